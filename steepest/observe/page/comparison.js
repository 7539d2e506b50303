// The page of a comparison: the same program under several strategies. What it shows is in the element "data".
  const data = JSON.parse(byId("data").textContent);
  const colourOf = (at) => PALETTE[at % PALETTE.length];
  const runs = data.runs.map((run) => ({ ...run, colour: colourOf(run.colour) })).filter((run) => run.curves);

  const sums = (column) => { let all = 0; return (column || []).map((n) => (all += n ?? 0)); };
  const rate = ({ sums: { samples, seconds: passed } }) => (samples || []).map((_, i) => {
    let many = 0, spent = 0;
    for (let at = i; at >= 0 && spent < 1; at -= 1) { many += samples[at] ?? 0; spent += passed[at] ?? 0; }
    return spent > 0 ? many / spent : null;
  });
  const of = (name) => (run) => (run.curves.values[name] || [[]])[0];
  const perStep = (name) => (run) => (run.curves.sums[name] || []).map((n, i) => n === null ? null : n / run.curves.steps[i]);
  const byTime = ["seconds of training", (run) => sums(run.curves.sums.seconds)];
  const bySamples = ["samples", (run) => sums(run.curves.sums.samples)];

  const addChart = (title, draw) => {
    const box = element("div", undefined, "chart"), target = element("div", undefined, "plot");
    box.append(element("h3", title), target);
    byId("charts").append(box);
    chart(target, draw);
  };
  const addCurves = (title, [axis, xs], ys) => addChart(title, (box) => plot(box, runs.map((run) => ({
    x: xs(run), y: ys(run), name: run.strategy, type: "scatter", mode: ys(run).filter(isNumber).length < xs(run).length || xs(run).length < 3 ? "lines+markers" : "lines", connectgaps: true, marker: { size: 5 },
    line: { width: 1.6, color: run.colour },
  })), { showlegend: true, xaxis: { title: { text: axis }, tickformat: "~s" }, yaxis: {} }));

  const drawCurves = () => {
    byId("charts").replaceChildren();
    if (!runs.length) { byId("charts").append(element("p", "No strategy has taken a step.", "quiet")); return; }
    if (data.by !== "loss") {
      addCurves(`${data.by.slice(8)} against time`, byTime, of(data.by));
      addCurves(`${data.by.slice(8)} against samples`, bySamples, of(data.by));
    }
    addCurves("loss against time", byTime, of("loss"));
    addCurves("loss against samples", bySamples, of("loss"));
    addCurves("samples per second", byTime, (run) => rate(run.curves));
    addChart("seconds for 1,000 samples, by part (means over workers)", (box) => plot(box, data.parts.map((part, at) => ({
      type: "bar", name: part, x: data.spent.map((each) => each.strategy), y: data.spent.map((each) => each.parts[at]),
      marker: { color: colourOf(at) },
    })), { barmode: "stack", showlegend: true, hovermode: "closest" }));
    addCurves("staleness, in updates", bySamples, of("staleness"));
    addCurves("bytes pushed in a step", bySamples, perStep("pushed"));
    addCurves("bytes pulled in a step", bySamples, perStep("pulled"));
  };

  document.title = `${data.name}: steepest`;
  byId("name").textContent = data.name;
  byId("about").textContent = data.about;
  byId("advice").textContent = data.advice;
  byId("rows").replaceChildren(table(data.head, data.rows));
  byId("made").textContent = `made ${moment(data.made)}, by steepest ${data.steepest}`;
  drawCurves();
  dark.addEventListener("change", drawCurves);
  requestAnimationFrame(() => setTimeout(loadCharts));
