// The page of several runs: of a program under several strategies, or any. What it shows is in the element "data", or is fetched
// every two seconds from where the page comes from.
  const EVERY = 2000;
  let data = null, runs = [];
  const colourOf = (at) => PALETTE[at % PALETTE.length];

  const sums = (column) => { let all = 0; return (column || []).map((n) => (all += n ?? 0)); };
  const rate = ({ sums: { samples, seconds: passed } }) => (samples || []).map((_, i) => {
    let many = 0, spent = 0;
    for (let at = i; at >= 0 && spent < 1; at -= 1) { many += samples[at] ?? 0; spent += passed[at] ?? 0; }
    return spent > 0 ? many / spent : null;
  });
  const of = (name) => (run) => (run.curves.values[name] || [[]])[0];
  const perStep = (name) => (run) => (run.curves.sums[name] || []).map((n, i) => n === null ? null : n / run.curves.steps[i]);
  const byTime = ["seconds of training", (run) => sums(run.curves.sums.seconds)];
  const byStep = ["step", (run) => run.curves.step];
  const bySamples = ["samples", (run) => sums(run.curves.sums.samples)];

  const addChart = (title, draw) => {
    const id = `chart ${title}`;
    let box = byId(id);
    if (!box) {
      box = element("div", undefined, "chart");
      box.id = id;
      box.append(element("h3", title), element("div", undefined, "plot"));
      byId("charts").append(box);
    }
    chart(box.lastChild, draw);
  };
  const addCurves = (title, [axis, xs], ys, fromZero = false, exact = false) => runs.some((run) => ys(run).some((y) => isNumber(y) && (y || !fromZero))) && addChart(title, (box) => plot(box, runs.map((run) => ({
    x: xs(run), y: exact ? ys(run) : smoothed(ys(run)), name: run.strategy, type: "scatter", mode: ys(run).filter(isNumber).length < xs(run).length || xs(run).length < 3 ? "lines+markers" : "lines", connectgaps: true, marker: { size: 5 },
    line: { width: 1.6, color: run.colour },
  })), { showlegend: true, xaxis: { title: { text: axis }, tickformat: "~s" }, yaxis: { type: byLog ? "log" : "linear", rangemode: fromZero && !byLog ? "tozero" : "normal" } }));

  const drawCurves = () => {
    if (!runs.length) { byId("charts").replaceChildren(element("p", "No step was taken.", "quiet")); return; }
    if (data.by !== "loss") {
      addCurves(`${data.by.slice(8)} against time`, byTime, of(data.by));
      addCurves(`${data.by.slice(8)} against samples`, bySamples, of(data.by));
    }
    for (const name of data.metrics || []) addCurves(`${name.slice(8)} against steps`, byStep, of(name));
    if (data.metrics) addCurves("loss against steps", byStep, of("loss"));
    const seen = (run) => run.evaluations || [], told = (name) => (row) => name === "loss" ? row.loss : row.metrics[name];
    const names = new Set(runs.flatMap(seen).flatMap((row) => ["loss", ...Object.keys(row.metrics)]));
    for (const name of names) addChart(`evaluation: ${name} against steps`, (box) => plot(box, runs.map((run) => ({
      x: seen(run).map((row) => row.step), y: seen(run).map(told(name)), name: run.strategy, type: "scatter", mode: "lines+markers",
      line: { width: 1.6, color: run.colour }, marker: { size: 5 },
    })), { showlegend: true, xaxis: { title: { text: "step" }, tickformat: "~s" }, yaxis: { type: byLog ? "log" : "linear" } }));
    addCurves("loss against time", byTime, of("loss"));
    addCurves("loss against samples", bySamples, of("loss"));
    addCurves("learning rate", byStep, of("learning rate"), true, true);
    addCurves("gradient norm", byStep, of("gradient norm"));
    addCurves("samples per second", byTime, (run) => rate(run.curves), true);
    if (data.spent.length) addChart("seconds for 1,000 samples, by part (means over workers)", (box) => plot(box, data.parts.map((part, at) => ({
      type: "bar", name: part, x: data.spent.map((each) => each.strategy), y: data.spent.map((each) => each.parts[at]),
      marker: { color: colourOf(at) },
    })), { barmode: "stack", showlegend: true, hovermode: "closest" }));
    addCurves("staleness, in updates", bySamples, of("staleness"), true);
    addCurves("bytes pushed in a step", bySamples, perStep("pushed"), true, true);
    addCurves("bytes pulled in a step", bySamples, perStep("pulled"), true, true);
  };

  const draw = () => {
    runs = data.runs.map((run) => ({ ...run, colour: colourOf(run.colour) })).filter((run) => run.curves);
    document.title = `${data.name}: steepest`;
    byId("name").textContent = data.name;
    byId("about").textContent = data.about;
    byId("advice").textContent = data.advice;
    byId("recommended").hidden = !data.advice;
    byId("strategies-head").textContent = data.advice ? "Strategies" : "Runs";
    byId("rows").replaceChildren(table(data.head, data.rows));
    byId("made").textContent = `made ${moment(data.made)}, by steepest ${data.steepest}`;
    drawCurves();
  };
  const update = async () => {
    let again = EVERY;
    try {
      if (!document.hidden || data === null) { data = await (await ask("data")).json(); draw(); }
    } catch (error) {
      byId("about").textContent = error.status ? error.message : "the page does not answer: steepest watch has ended, or cannot be reached";
      if (error.status) return;
      again *= 4;
    }
    setTimeout(update, again);
  };
  onCurvesChosen(() => { if (data) drawCurves(); });
  dark.addEventListener("change", () => { if (data) drawCurves(); });
  requestAnimationFrame(() => setTimeout(loadCharts));
  const kept = byId("data");
  if (kept) {
    data = JSON.parse(kept.textContent);
    draw();
  } else update();
