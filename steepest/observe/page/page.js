// The page of a job. What it shows is in the element "data", or is fetched twice a second from where the page comes from.
  const FORMAT = 1, EVERY = 500, MOST_MARKS = 200, WORST = 8;
  const DEATHS = new Set(["replaced", "left", "recovered"]);
  const SLOW = 0.7; // a score below which a worker is called slow
  const WAITED = 0.1; // of steps that it ended last: with less the others do not wait for a slow worker
  let data = null, byTime = false, failing = 0;

  const place = (row) => byTime ? new Date(row.time * 1000) : row.step;
  // vertical lines, on an axis of their own from 0 to 1; as curves, which take much less time than shapes
  const marks = () => {
    const c = colours();
    const lines = (rows, colour, height, dash) => ({
      x: rows.flatMap((row) => [place(row), place(row), null]), y: rows.flatMap(() => [0, height, null]), yaxis: "y2", type: "scatter",
      mode: "lines", line: { color: colour, width: 1, dash }, hoverinfo: "skip", showlegend: false,
    });
    const events = data.events.slice(-MOST_MARKS);
    return [
      lines(events.filter((each) => DEATHS.has(each.kind)), c.bad, 1, "dot"), lines(events.filter((each) => !DEATHS.has(each.kind)), c.change, 1, "dot"),
      lines(data.checkpoints.slice(-MOST_MARKS), c.quiet, 0.05, "solid"),
    ].filter((trace) => trace.x.length);
  };

  // the curves of a chart, and what is a group of its own
  const groupOf = (name) => name.startsWith("metrics/") ? name.slice(8) : name.split("/")[0];
  const TITLES = {
    "seconds": "seconds of a step, by part (means over workers)", "processes": "processes",
    "staleness": "staleness, in updates", "bytes": "bytes of a step",
  };
  const FIRST = ["loss", "samples per second", "learning rate", "gradient norm", "seconds", "staleness", "bytes", "processes"];
  const EXACT = new Set(["learning rate", "bytes", "processes"]); // are what they are: not smoothed
  const FROM_ZERO = new Set(["samples per second", "learning rate", "seconds", "bytes", "processes"]);
  const derived = () => {
    const { sums, steps } = data.curves, found = {};
    if (sums.samples) {
      // over at least a second of training: results of steps come in bursts
      found["samples per second"] = [sums.samples.map((_, i) => {
        let many = 0, passed = 0;
        for (let at = i; at >= 0 && passed < 1 && sums.seconds[at] !== null; at -= 1) { many += sums.samples[at]; passed += sums.seconds[at]; }
        return passed > 0 ? many / passed : null;
      })];
    }
    for (const name of ["pushed", "pulled"]) if (sums[name]) found[`bytes/${name}`] = [sums[name].map((n, i) => n === null ? null : n / steps[i])];
    return found;
  };
  const isFlat = (columns, value) => columns[0].every((x) => x === null || x === value);

  const drawCurves = () => {
    const all = { ...data.curves.values, ...derived() }, groups = new Map();
    for (const name of Object.keys(all)) {
      if ((name === "staleness" || name.startsWith("bytes/")) && isFlat(all[name], 0)) continue;
      const group = groupOf(name);
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(name);
    }
    // what evaluations alone have
    for (const row of data.evaluations) for (const name of Object.keys(row.metrics || {})) if (!groups.has(name)) groups.set(name, []);
    const rank = (group) => {
      const at = FIRST.indexOf(group);
      return group === "loss" ? -1 : at < 0 ? 0 : at; // metrics come after the loss
    };
    const names = [...groups.keys()].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
    for (const group of names) {
      const id = `curve ${group}`;
      let box = byId(id);
      if (!box) {
        box = element("div", undefined, "chart");
        box.id = id;
        box.append(element("h3", TITLES[group] || group), element("div", undefined, "plot"));
        const later = [...byId("charts").children].find((c) => names.indexOf(c.id.slice(6)) > names.indexOf(group));
        byId("charts").insertBefore(box, later || null);
      }
      chart(box.lastChild, (target) => drawCurve(target, group, groups.get(group), all));
    }
    const { width } = data.curves;
    byId("width").textContent = width > 1 ? `each point is the mean of ${width} steps, its band reaches from the least to the greatest` : "";
  };

  const drawCurve = (box, group, names, all) => {
    const xs = byTime ? data.curves.time.map((t) => new Date(t * 1000)) : data.curves.step;
    const traces = [];
    names.forEach((name, at) => {
      const [mean, least, most] = all[name], colour = PALETTE[at % PALETTE.length];
      const ys = EXACT.has(group) ? mean : smoothed(mean);
      const label = name === "metrics/loss" ? "reported by the script" : name.includes("/") && !name.startsWith("metrics/") ? name.split("/").slice(1).join("/") : group;
      if (most) {
        const band = { x: xs, type: "scatter", mode: "lines", line: { width: 0, color: colour }, hoverinfo: "skip", showlegend: false };
        traces.push({ ...band, y: least }, { ...band, y: most, fill: "tonexty", fillcolor: `${colour}33` });
      }
      // what few steps have, such as a report of an epoch, is joined over the others
      const rare = 2 * mean.filter(isNumber).length < xs.length || xs.length < 3;
      traces.push({ x: xs, y: ys, name: label, type: "scatter", mode: rare ? "lines+markers" : "lines", connectgaps: rare, line: { width: 1.6, color: colour }, marker: { size: 5 } });
    });
    const logs = byLog && group !== "processes";
    const metric = (row) => group === "loss" ? row.loss : (row.metrics || {})[group];
    const seen = group === "loss" || !names.length || names[0].startsWith("metrics/") ? data.evaluations.filter((row) => isNumber(metric(row))) : [];
    if (seen.length) {
      traces.push({
        x: seen.map(place), y: seen.map(metric), name: "evaluation", type: "scatter", mode: "lines+markers",
        line: { width: 1, dash: "dot", color: colours().good }, marker: { size: seen.length > 40 ? 3 : 6, color: colours().good },
      });
    }
    plot(box, [...traces, ...marks()], { yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true }, showlegend: names.length > 1 || seen.length > 0, xaxis: { tickformat: byTime ? undefined : "~s" },
      yaxis: { tickformat: group === "bytes" || group === "samples per second" ? "~s" : undefined, exponentformat: "power", type: logs ? "log" : "linear", rangemode: FROM_ZERO.has(group) && !logs ? "tozero" : "normal" } });
  };

  // -- workers -------------------------------------------------------------------------------

  const middle = (xs) => { const sorted = xs.filter(isNumber).sort((a, b) => a - b); return sorted.length ? sorted[sorted.length >> 1] : null; };
  // seconds of a step for which a worker waited for a processor, at most: other programs took it
  const starved = (each) => {
    const process = data.processes.find((one) => one.name === `worker ${each.worker}`);
    return data.training && process && isNumber(process.waited) ? Math.min(process.waited * (each.compute + each.data + each.wait), each.compute) : null;
  };
  // whether a score is low although these seconds do not count
  const isSlow = (each, score) => score < SLOW && score * each.compute < SLOW * (each.compute - (starved(each) ?? 0));
  const score = (x, slow) => isNumber(x) ? [x.toFixed(2), slow ? "bad" : ""] : "–";
  const drawWorkers = () => {
    const { workers, scores, lanes, spans } = data.workers;
    const first = [...scores].sort((a, b) => b.last - a.last)[0];
    byId("waited").textContent = !scores.length ? "Nothing is known of single workers." :
      scores.length === 1 ? "One worker: it waits for nobody." :
      !first.last ? "" : `Of the last ${lanes.length === 1 ? "step" : `${lanes.length} steps`} worker ${first.worker} ended ${Math.round(100 * first.last)} % last, ` +
        `${seconds(first.cost)} after the others' median: ${first.last < 0.5 || first.others >= SLOW ? "nobody is waited for in particular." :
        isSlow(first, first.others) ? "the others wait for it." :
        `the others wait for it. Of ${seconds(first.compute)} it waits ${seconds(starved(first))} for a processor: its machine is busy.`}`;
    const all = middle(scores.map((each) => each.itself)); // where all are slower than usual, the machine is
    const starve = scores.some((each) => isNumber(starved(each)));
    const head = ["worker", "computing", "data", "waiting", ...(starve ? ["without a processor"] : []), "against the others", "against itself", "last to end", "later than the others"];
    const slow = (each, score) => isSlow(each, score) && (scores.length < 2 || each.last >= WAITED);
    const worst = (each) => Math.min(each.others ?? 1, each.itself ?? 1) - each.last;
    const rows = [...scores].sort((a, b) => worst(a) - worst(b) || a.worker - b.worker).map((each) => [
      `worker ${each.worker}`, seconds(each.compute), seconds(each.data), seconds(each.wait),
      ...(starve ? [seconds(starved(each))] : []),
      score(each.others, slow(each, each.others)),
      score(each.itself, slow(each, each.itself) && (scores.length < 2 || each.itself < SLOW * all)),
      `${Math.round(100 * each.last)} %`, each.last ? seconds(each.cost) : "–",
    ]);
    const kept = byId("rest"), shown = rows.length ? [table(head, rows.slice(0, WORST))] : [];
    if (rows.length > WORST) {
      const rest = element("details");
      rest.id = "rest";
      rest.open = kept !== null && kept.open;
      rest.append(element("summary", `the other ${rows.length - WORST} workers`), table(head, rows.slice(WORST)));
      shown.push(rest);
    }
    byId("scores").replaceChildren(...shown);
    const lanesBox = byId("lanes"), heatBox = byId("heat");
    lanesBox.hidden = !lanes.length;
    heatBox.hidden = !spans.step || spans.step.length < 2;
    if (lanes.length) chart(lanesBox.lastChild, drawLanes);
    if (!heatBox.hidden) chart(heatBox.lastChild, drawHeat);
  };

  const every = (workers) => Math.ceil(workers.length / 16); // of which one has its name beside its lane
  const drawLanes = (box) => {
    const { workers, lanes } = data.workers;
    const busyMost = Math.max(...lanes[lanes.length - 1][2].map(([, d, c]) => d + c));
    const parts = [["computing", 2, PALETTE[0]], ["data", 1, PALETTE[1]], ["waiting", 3, "rgba(128,128,128,0.35)"]];
    const bars = parts.map(([name, , colour]) => ({
      type: "bar", orientation: "h", name, y: [], x: [], base: [], customdata: [], marker: { color: colour, line: { width: 0 } },
      hovertemplate: `%{y}: ${name} %{x:.4f} s, step %{customdata}<extra></extra>`,
    }));
    // each worker's steps follow one another, back from the last commit
    const ends = new Map();
    for (let at = lanes.length - 1; at >= 0; at -= 1) {
      const [step, , shares] = lanes[at];
      for (const [worker, d, c, wait] of shares) {
        if (!ends.has(worker)) ends.set(worker, at === lanes.length - 1 ? (d + c) - busyMost : 0);
        let end = ends.get(worker);
        parts.forEach(([, part], bar) => {
          const length = [0, d, c, wait][part];
          bars[bar].y.push(`worker ${worker}`);
          bars[bar].x.push(length);
          bars[bar].base.push(end - length);
          bars[bar].customdata.push(step);
          end -= length;
        });
        ends.set(worker, end);
      }
    }
    plot(box, bars, {
      barmode: "overlay", bargap: 0.2, hovermode: "closest", showlegend: true, height: 100 + (workers.length > 16 ? 10 : 18) * Math.max(4, workers.length),
      xaxis: { title: { text: "seconds before the last commit" } },
      yaxis: { categoryorder: "array", categoryarray: workers.map((w) => `worker ${w}`).reverse(), dtick: every(workers) },
    });
  };

  const drawServers = () => {
    const servers = data.servers || [], box = byId("servers");
    box.hidden = !servers.length;
    if (servers.length) chart(box.lastChild, (target) => plotServers(target, servers));
  };

  const plotServers = (box, servers) => {
    const parts = [["taking gradients", "taking", PALETTE[0]], ["updating and sending", "updating", PALETTE[1]], ["waiting", "waiting", "rgba(128,128,128,0.35)"]];
    const names = servers.map((each) => `server ${each.server}`);
    const bars = parts.map(([name, part, colour]) => ({
      type: "bar", orientation: "h", name, y: names, x: servers.map((each) => each[part]), marker: { color: colour, line: { width: 0 } },
      hovertemplate: `%{y}: ${name} %{x:.4f} s<extra></extra>`,
    }));
    plot(box, bars, {
      barmode: "stack", bargap: 0.2, hovermode: "closest", showlegend: true, height: 100 + (names.length > 16 ? 10 : 18) * Math.max(4, names.length),
      xaxis: { title: { text: "seconds" } }, yaxis: { categoryorder: "array", categoryarray: [...names].reverse(), dtick: every(names) },
    });
  };

  const drawHeat = (box) => {
    const { spans } = data.workers, { workers } = spans;
    plot(box, [{
      type: "heatmap", x: spans.step, y: workers.map((w) => `worker ${w}`), z: spans.compute, colorscale: dark.matches ? "Viridis" : "YlGnBu",
      colorbar: { thickness: 10, len: 1 }, hovertemplate: "%{y}, step %{x}: %{z:.4f} s<extra></extra>",
    }], { hovermode: "closest", height: 100 + (workers.length > 16 ? 8 : 16) * Math.max(4, workers.length), yaxis: { autorange: "reversed", dtick: every(workers) }, xaxis: { title: { text: "step" } } });
  };

  // -- tables --------------------------------------------------------------------------------

  const drawChanges = () => {
    const rows = [...data.events].reverse().slice(0, 100).map((event) => [
      moment(event.time), number(event.step), [event.kind, DEATHS.has(event.kind) ? "bad" : "change"], event.cause || event.line || "–",
      event.seen || "–", event.decision || event.line || "–",
      Object.entries(event.spent).map(([name, s]) => `${name} ${s.toFixed(2)} s`).join(", ") || "–",
      isNumber(event.steps) ? `${event.steps} steps` : "–",
    ]);
    const head = ["time", "step", "kind", "cause", "seen", "decided", "took", "taken again"];
    byId("changes").replaceChildren(rows.length ? table(head, rows) : element("p", "None: all processes are those with which it began.", "quiet"));
  };

  const logButton = (name) => {
    const made = element("button", "last lines");
    made.type = "button";
    made.addEventListener("click", () => { made.blur(); show(`log?process=${encodeURIComponent(name)}`); });
    return made;
  };
  const drawProcesses = () => {
    const ended = (data.ended || []).map((each) => ({ ...each, name: `${each.name}, ended`, log: each.name }));
    const rows = [...data.processes, ...ended].map((each) => [each.name, each.host, each.node.length > 16 ? each.node.slice(0, 8) : each.node, String(each.pid), isNumber(each.memory) ? bytes(each.memory) : "–",
      isNumber(each.processor) ? `${Math.round(100 * each.processor)} %` : "–", isNumber(each.sent) ? `${bytes(each.sent)}/s` : "–",
      ...(data.live ? [logButton(each.log || each.name)] : [])]);
    const head = ["process", "host", "node", "pid", "memory", "processor", "sends", ...(data.live ? ["output"] : [])];
    // a button that is pressed, or has the focus, stays the one that it is
    if (byId("processes").contains(document.activeElement)) return;
    byId("processes").replaceChildren(rows.length ? table(head, rows) : element("p", "Nothing is known of them.", "quiet"));
    byId("stacks").hidden = !data.live;
  };

  // seconds that the steps to come of the present call take, by the pace of the last ones
  const timeLeft = () => {
    const { step, steps, sums } = data.curves, count = data.goal - data.about.step;
    if (failing || !data.live || !data.training || !(count > 0 && count < 1e9) || !sums.seconds) return null;
    let many = 0, passed = 0;
    for (let at = step.length - 1; at >= 0 && (passed < 10 || many < 10); at -= 1) { many += steps[at]; passed += sums.seconds[at] || 0; }
    return many ? duration(count * passed / many) : null;
  };

  const drawHead = () => {
    const { about } = data, rate = derived()["samples per second"];
    document.title = `${about.name}: steepest`;
    byId("name").textContent = about.name;
    byId("state").textContent = failing ? `the job has not answered for ${Math.round((Date.now() - failing) / 1000)} s: it has ended, or cannot be reached` :
      data.live ? (data.training ? "live: training" : "live: idle") : `as it was when it was last written, ${moment(about.time)}`;
    byId("notes").replaceChildren(...about.notes.map((note) => element("p", note)));
    const last = rate ? rate[0][rate[0].length - 1] : null;
    const one = (name, many) => many === 1 ? name.slice(0, -1) : name;
    const figures = [
      ["step", number(about.step)], ["epoch", isNumber(about.epoch) ? number(about.epoch) : null], ["loss", number(about.loss)], ["samples/s", isNumber(last) ? number(last) : null],
      ["samples", number(about.samples)], ["strategy", about.strategy || null], [one("workers", about.workers), number(about.workers)], [one("servers", about.servers), number(about.servers)],
      ["training", duration(about.seconds)], ["left", timeLeft()], ["pushed", bytes(about.pushed)], ["pulled", bytes(about.pulled)],
    ].filter(([, value]) => value !== null);
    byId("figures").replaceChildren(...figures.map(([name, value]) => {
      const item = element("li");
      item.append(element("b", value), element("span", name));
      return item;
    }));
    const settings = Object.entries(about.settings || {});
    byId("settings").hidden = !settings.length;
    byId("told").replaceChildren(...settings.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
    byId("made").textContent = `made ${moment(about.made)}${about.steepest ? `, of a run of steepest ${about.steepest}` : ""}`;
  };

  const draw = () => { drawHead(); drawCurves(); drawWorkers(); drawServers(); drawChanges(); drawProcesses(); };

  // -- a live job ----------------------------------------------------------------------------

  const merge = (found) => {
    const old = data && data.curves, now = found.curves;
    if (old && now.from > 0) {
      const keep = now.from;
      const join = (a, b, size) => [...(a ? a.slice(0, keep) : Array(keep).fill(null)), ...(b || Array(size).fill(null))];
      const size = now.step.length;
      for (const name of ["step", "time", "steps"]) now[name] = join(old[name], now[name], size);
      for (const name of new Set([...Object.keys(old.sums), ...Object.keys(now.sums)])) now.sums[name] = join(old.sums[name], now.sums[name], size);
      for (const name of new Set([...Object.keys(old.values), ...Object.keys(now.values)])) {
        const before = old.values[name] || [], after = now.values[name] || [];
        now.values[name] = Array.from({ length: Math.max(before.length, after.length) }, (_, i) => join(before[i], after[i], size));
      }
    }
    if (!("events" in found)) { // these are as they were
      for (const name of ["evaluations", "checkpoints", "events"]) found[name] = data[name];
      found.workers.spans = data.workers.spans;
    }
    data = found;
  };
  const update = async () => {
    try {
      if (!document.hidden || data === null) {
        const since = data ? `?since=${Math.max(data.curves.step.length - 1, 0)}&revision=${data.curves.revision}&changes=${data.changes}` : "";
        const found = await (await ask(`data${since}`)).json();
        failing = 0;
        if (found.format !== FORMAT) throw Object.assign(new Error("the job is of another version of steepest: load this page again"), { status: 409 });
        merge(found);
        draw();
      }
    } catch (error) {
      if (error.status) { byId("state").textContent = error.message; return; }
      failing = failing || Date.now();
      if (data) drawHead();
      else byId("state").textContent = "the job does not answer: it has ended, or cannot be reached";
    }
    setTimeout(update, failing ? 4 * EVERY : EVERY);
  };

  const show = async (what) => {
    const box = byId("text");
    box.textContent = "asking";
    byId("dialog").showModal();
    try { box.textContent = await (await ask(what)).text(); }
    catch (error) { box.textContent = error.message; }
    box.scrollIntoView({ block: "end" });
  };
  byId("stacks").addEventListener("click", () => show("stacks"));
  for (const [id, value] of [["by-step", false], ["by-time", true]]) {
    byId(id).addEventListener("click", () => {
      byTime = value;
      byId("by-step").setAttribute("aria-pressed", String(!value));
      byId("by-time").setAttribute("aria-pressed", String(value));
      if (data) drawCurves();
    });
  }
  onCurvesChosen(() => { if (data) drawCurves(); });
  dark.addEventListener("change", () => { if (data) draw(); });
  requestAnimationFrame(() => setTimeout(loadCharts));
  const kept = byId("data");
  if (kept) {
    data = JSON.parse(kept.textContent);
    draw();
  } else {
    update();
  }
