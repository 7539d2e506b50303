// What the scripts of all pages draw with: words, tables, and charts, which are drawn when they come into sight, or are printed.
  const byId = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // -- words and numbers ---------------------------------------------------------------------

  const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
  const number = (x) => isNumber(x) ? (Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(4))) : "–";
  const seconds = (x) => !isNumber(x) ? "–" : x < 1 ? `${+(x * 1000).toPrecision(3)} ms` : `${+x.toPrecision(4)} s`;
  const bytes = (x) => {
    if (!isNumber(x)) return "–";
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let at = 0;
    while (Math.abs(x) >= 1000 && at < units.length - 1) { x /= 1000; at += 1; }
    return `${+x.toPrecision(3)} ${units[at]}`;
  };
  const moment = (t) => isNumber(t) ? new Date(t * 1000).toLocaleString() : "–";
  const duration = (s) => {
    if (!isNumber(s)) return "–";
    const whole = Math.round(s), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60;
    return h ? `${h} h ${m} min` : m ? `${m} min ${whole % 60} s` : `${+s.toPrecision(3)} s`;
  };
  const element = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  // head: names of columns; rows: of each its cells, a text or [text, class] or an element
  const table = (head, rows) => {
    const made = element("table", undefined, "cards"), top = made.createTHead().insertRow();
    for (const name of head) top.append(element("th", name));
    const body = made.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      row.forEach((cell, at) => {
        const box = line.insertCell();
        box.dataset.head = head[at];
        if (cell instanceof Node) box.append(cell);
        else { const [text, kind] = Array.isArray(cell) ? cell : [cell, ""]; box.append(element("span", text, kind)); }
      });
    }
    return made;
  };

  // -- charts: drawn when they come into sight -----------------------------------------------

  const colours = () => {
    const style = getComputedStyle(document.documentElement);
    const found = {};
    for (const name of ["text", "quiet", "line", "accent", "bad", "change", "good"]) found[name] = style.getPropertyValue(`--${name}`).trim();
    return found;
  };
  const PALETTE = ["#1f77b4", "#e6761b", "#2ca02c", "#c13fc1", "#8c6d4f", "#17a5b8", "#b8a000", "#e05285"];
  const drawings = new Map(); // by element: {draw, dirty, seen}
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const drawing = drawings.get(entry.target);
      drawing.seen = entry.isIntersecting;
      drawIfDue(entry.target);
    }
  }, { rootMargin: "150px" });
  const drawIfDue = (box, printed = false) => {
    const drawing = drawings.get(box);
    if ((drawing.seen || printed) && drawing.dirty && window.Plotly) { drawing.dirty = false; drawing.draw(box); }
  };
  addEventListener("beforeprint", () => { for (const box of drawings.keys()) drawIfDue(box, true); });
  const chart = (box, draw) => {
    if (!drawings.has(box)) { drawings.set(box, { draw, dirty: true, seen: false }); watcher.observe(box); }
    const drawing = drawings.get(box);
    drawing.draw = draw;
    drawing.dirty = true;
    drawIfDue(box);
  };
  const layout = (more) => {
    const c = colours();
    const axis = { gridcolor: c.line, linecolor: c.line, zeroline: false, automargin: true };
    return {
      height: 220, margin: { l: 48, r: 10, t: more.showlegend ? 26 : 8, b: 32 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: c.text, size: 12 }, hovermode: "x unified", hoverlabel: { bgcolor: dark.matches ? "#1d2126" : "#ffffff" },
      showlegend: false, legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0 }, ...more,
      xaxis: { ...axis, ...(more.xaxis || {}) }, yaxis: { ...axis, ...(more.yaxis || {}) },
    };
  };
  const plot = (box, traces, more) =>
    Plotly.react(box, traces, layout(more), { responsive: true, displaylogo: false, displayModeBar: false });

  // -- how curves are drawn, by the buttons of the page -----------------------------------------

  let byLog = false, smoothing = 0;
  const onCurvesChosen = (drawAgain) => {
    byId("log").addEventListener("click", () => {
      byLog = !byLog;
      byId("log").setAttribute("aria-pressed", String(byLog));
      drawAgain();
    });
    byId("smooth").addEventListener("input", () => { smoothing = Number(byId("smooth").value); drawAgain(); });
  };
  // an exponential mean of what came so far, without the weight of the time before the first value
  const smoothed = (values) => {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (!smoothing || !isNumber(value)) return value;
      sum = smoothing * sum + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return sum / weight;
    });
  };

  // what draws the charts is large: the rest is shown before it is run
  const loadCharts = () => {
    const script = element("script"), kept = byId("charts-script");
    const drawAll = () => { for (const box of drawings.keys()) drawIfDue(box); };
    if (kept) script.textContent = kept.textContent;
    else { script.src = "charts.js"; script.onload = drawAll; }
    document.head.append(script);
    if (kept) drawAll();
  };

  // -- a page that is served: what it shows is fetched, with the token of its address -----------

  const tokenOf = () => decodeURIComponent((location.hash.match(/token=([^&]*)/) || ["", ""])[1]);
  const ask = async (what) => {
    const answer = await fetch(what, { headers: { Authorization: `Bearer ${tokenOf()}` }, cache: "no-store" });
    if (!answer.ok) throw Object.assign(new Error(await answer.text()), { status: answer.status });
    return answer;
  };
