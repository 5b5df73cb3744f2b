"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const hidden = new Set(), height = 220;
  const dashes = [[], [8, 4], [2, 3]];
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const number = (text) => Number(text);

  // Numbers with a suffix or an exponent where that is shorter.
  function written(value) {
    if (value == null) return "";
    const size = Math.abs(value);
    for (const [limit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= limit) return String(Number((value / (letter === "k" ? 1e3 : limit)).toPrecision(5))) + letter;
    if (size && size < 1e-3) return String(Number(value.toPrecision(4)).toExponential());
    return String(Number(value.toPrecision(6)));
  }

  // The steps come as distances. uPlot wants one list of steps for all curves of a chart.
  function decoded(chart) {
    const tables = chart.series.map((series) => {
      let step = 0;
      const steps = series.x.split(" ").map((distance) => (step += Number(distance)));
      return [steps, series.y.split(" ").map(number)];
    });
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  const decodedCharts = data.charts.map(decoded);
  const full = [Infinity, -Infinity];
  for (const [steps] of decodedCharts) {
    full[0] = Math.min(full[0], steps[0]);
    full[1] = Math.max(full[1], steps[steps.length - 1]);
  }
  if (full[0] === full[1]) { full[0] -= 1; full[1] += 1; }
  let range = [...full];
  let plots = [];
  let setting = false;
  const [from, to, log, clip, smooth] = ["from", "to", "log", "clip", "smooth"].map((id) => document.getElementById(id));

  // All charts show the same steps.
  function show(low, high) {
    if (!(high > low)) return;
    range = [Math.max(low, full[0]), Math.min(high, full[1])];
    if (!(range[1] > range[0])) range = [...full];
    from.value = Math.floor(range[0]);
    to.value = Math.ceil(range[1]);
    setting = true;
    for (const plot of plots) plot.setScale("x", { min: range[0], max: range[1] });
    setting = false;
  }

  function zoom(how) {
    const [low, high] = range, width = high - low, centre = (low + high) / 2;
    if (how === "all") show(...full);
    if (how === "in") show(centre - width / 4, centre + width / 4);
    if (how === "out") show(centre - width, centre + width);
    if (how === "left") { const by = Math.min(width / 4, low - full[0]); show(low - by, high - by); }
    if (how === "right") { const by = Math.min(width / 4, full[1] - high); show(low + by, high + by); }
  }

  function drawMarks(plot, chart) {
    const context = plot.ctx, { left, top, width, height } = plot.bbox, ratio = devicePixelRatio;
    context.save();
    context.font = `${11 * ratio}px system-ui, sans-serif`;
    context.textBaseline = "top";
    context.textAlign = "left";
    const ends = [];
    for (const run of new Set(chart.series.map((series) => series.run))) {
      if (hidden.has(run)) continue;
      for (const mark of data.runs[run].marks) {
        const x = plot.valToPos(mark.x, "x", true);
        if (x < left || x > left + width) continue;
        context.strokeStyle = context.fillStyle = colour("--c" + (run % 8));
        context.lineWidth = ratio;
        context.setLineDash([4 * ratio, 4 * ratio]);
        context.beginPath(); context.moveTo(x, top); context.lineTo(x, top + height); context.stroke();
        const text = `${mark.number}${mark.cause ? ": " + mark.cause : ""}`, wide = context.measureText(text).width;
        const begin = Math.min(x + 4 * ratio, left + width - wide);
        const row = [0, 1, 2].find((n) => !(ends[n] > begin));
        if (row === undefined) continue;
        ends[row] = begin + wide + 6 * ratio;
        context.fillText(text, begin, top + (2 + 13 * row) * ratio);
      }
    }
    context.restore();
  }

  function readout(plot, chart, output) {
    const at = plot.cursor.idx ?? plot.series[0].idxs?.[1], words = [];  // without a cursor, the last values
    if (at == null) return;
    chart.series.forEach(({ run }, index) => {
      if (hidden.has(run)) return;
      const values = plot.data[index + 1];
      let near = at;
      while (near > 0 && values[near] == null) near -= 1;
      if (values[near] != null) words.push(`${name(chart, index)} ${written(values[near])}`);
    });
    output.textContent = `step ${plot.data[0][at]}: ${words.join(" · ")}`;
  }

  // Of a single run's nodes, the name of the run says nothing. Their colours differ, as those of several runs do.
  const name = (chart, index) => [data.runs.length > 1 || !chart.series[index].node ? data.runs[chart.series[index].run].name : "",
    chart.series[index].node].filter(Boolean).join(" ");
  const hue = (chart, index) => colour("--c" + ((chart.series[index].node && data.runs.length === 1 ? index : chart.series[index].run) % 8));

  // A moving average over a fiftieth of the points. The buckets' extremes come in pairs, so it stays in their middle.
  function smoothed(values) {
    const known = values.reduce((count, value) => count + (value != null), 0), share = 1 / Math.max(known / 50, 1);
    let mean = null;
    return values.map((value) => (value == null ? value : (mean = mean == null ? value : mean + share * (value - mean))));
  }

  // The range of the values that are shown, without the lowest and the highest hundredth.
  function inner(plot, low, high) {
    const [first, last] = plot.series[0].idxs ?? [0, plot.data[0].length - 1], values = [];
    plot.data.slice(1).forEach((each, index) => {
      if (plot.series[index + 1].show) for (let n = first; n <= last; n += 1) if (each[n] != null) values.push(each[n]);
    });
    values.sort((a, b) => a - b);
    const at = (share) => values[Math.round(share * (values.length - 1))];
    return values.length ? uPlot.rangeNum(at(0.01), at(0.99), 0.1, true) : [low, high];
  }

  function draw(figure, index) {
    const chart = data.charts[index], place = figure.querySelector(".plot"), output = figure.querySelector(".readout");
    const [steps, ...curves] = decodedCharts[index], values = [steps, ...(smooth.checked ? curves.map(smoothed) : curves)];
    const logarithmic = log.checked && values.slice(1).every((each) => each.every((value) => value == null || value > 0));
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 },
      font: "12px system-ui, sans-serif", values: (plot, ticks) => ticks.map(written) };
    const plot = new uPlot({
      width: place.clientWidth || 600, height, legend: { show: false },
      scales: { x: { time: false }, y: logarithmic ? { distr: 3 } : clip.checked ? { range: inner } : {} },
      axes: [{ ...axis, size: 34 }, { ...axis, size: 62, values: (plot, ticks) => ticks.map((tick) => (tick == null ? "" : written(tick))) }],
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, bind: { dblclick: () => () => { show(...full); return null; } } },
      series: [{}, ...chart.series.map(({ run }, index) => ({
        stroke: hue(chart, index), width: 1.5, dash: dashes[Math.floor(run / 8) % 3], show: !hidden.has(run),
        points: { fill: colour("--back") } }))],
      hooks: {
        draw: [(plot) => drawMarks(plot, chart)],
        setCursor: [(plot) => readout(plot, chart, output)],
        setScale: [(plot, key) => { if (key === "x" && !setting) show(plot.scales.x.min, plot.scales.x.max); }],
        drawClear: [(plot) => readout(plot, chart, output)],
      },
    }, values, place);
    return plot;
  }

  const figures = [...document.querySelectorAll(".chart")];
  function drawAll() {
    setting = true;
    for (const plot of plots) plot.destroy();
    plots = figures.map(draw);
    setting = false;
    show(...range);
  }

  figures.forEach((figure) => figure.addEventListener("keydown", (event) => {
    const how = { "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right" }[event.key];
    if (!how || event.target !== figure || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    zoom(how);
  }));
  document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => zoom(button.dataset.zoom)));
  for (const field of [from, to]) field?.addEventListener("change", () => show(Number(from.value), Number(to.value)));
  document.querySelectorAll(".toggle").forEach((box) => box.addEventListener("change", () => {
    const run = Number(box.dataset.run);
    if (box.checked) hidden.delete(run); else hidden.add(run);
    drawAll();
  }));
  for (const box of [log, clip, smooth]) box?.addEventListener("change", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => { root.classList.add("print"); drawAll(); });
  addEventListener("afterprint", () => { root.classList.remove("print"); drawAll(); });
  if (figures.length) {
    drawAll();
    new ResizeObserver(() => figures.forEach((figure, index) => {
      const width = figure.querySelector(".plot").clientWidth;
      if (width && width !== plots[index].width) plots[index].setSize({ width, height });
    })).observe(document.body);
  }
  // Parallel coordinates of a sweep, from the overview's table: an axis for each parameter and for the last loss.
  const sweep = document.getElementById("sweep");
  if (sweep) {
    const rows = [...document.querySelectorAll("#overview tbody tr")], output = sweep.querySelector(".readout");
    const all = [...document.querySelectorAll("#overview thead th")];
    const axes = all.filter((head) => head.classList.contains("axis")).map((head) => {
      const texts = rows.map((row) => row.cells[head.cellIndex].textContent);
      const known = [...new Set(texts.filter((text) => text !== ""))], numeric = known.every((text) => isFinite(text));
      const ordered = numeric ? known.map(Number).sort((a, b) => a - b) : known.sort();
      // Values such as 1e-5, 1e-4, 1e-3 stand at equal distances.
      const low = ordered[0], high = ordered[ordered.length - 1];
      const scale = numeric && low > 0 && high / low >= 20 ? Math.log : (value) => value;
      const place = (text) => text === "" ? null : !numeric ? (ordered.indexOf(text) + 0.5) / ordered.length
        : low === high ? 0.5 : (scale(Number(text)) - scale(low)) / (scale(high) - scale(low));
      return { title: head.textContent, texts, places: texts.map(place), ticks: numeric && ordered.length > 8 ? [low, high] : ordered, place };
    });
    const lines = rows.filter((row, n) => axes.filter((axis) => axis.places[n] !== null).length > 1);
    if (axes.length > 1 && lines.length > 1) {
      const wide = Math.max(150 * axes.length, Math.min(260 * axes.length, sweep.parentElement.clientWidth)), tall = 260, top = 34, bottom = tall - 14;
      const across = (k) => 70 + k * (wide - 140) / (axes.length - 1), down = (place) => bottom - place * (bottom - top);
      const make = (kind, values, text) => {
        const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
        for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
        if (text !== undefined) made.textContent = text;
        return made;
      };
      const svg = make("svg", { viewBox: `0 0 ${wide} ${tall}`, width: wide, height: tall, role: "img", "aria-label": "Parallel coordinates" });
      const loss = axes[axes.length - 1];
      rows.forEach((row, n) => {
        if (!lines.includes(row)) return;
        const at = axes.map((axis, k) => axis.places[n] === null ? "" : `${across(k)},${down(axis.places[n])}`).filter(Boolean);
        const share = loss.places[n], line = make("polyline", { points: at.join(" "), class: share === null ? "" : share < 1 / 3 ? "low" : share < 2 / 3 ? "middle" : "high" });
        const words = [row.cells[0].textContent, ...axes.map((axis) => axis.texts[n] && `${axis.title} ${axis.texts[n]}`)].filter(Boolean).join(" \u00b7 ");
        line.append(make("title", {}, words));
        line.addEventListener("pointerenter", () => { line.classList.add("chosen"); output.textContent = words; });
        line.addEventListener("pointerleave", () => line.classList.remove("chosen"));
        svg.append(line);
      });
      axes.forEach((axis, k) => {
        svg.append(make("line", { x1: across(k), x2: across(k), y1: top, y2: bottom }));
        svg.append(make("text", { x: across(k), y: 14, "text-anchor": "middle", class: "title" }, axis.title));
        for (const tick of axis.ticks) {
          const text = typeof tick === "number" ? written(tick) : tick, short = text.length > 14 ? `${text.slice(0, 13)}\u2026` : text;
          svg.append(make("text", { x: across(k) + 6, y: down(axis.place(String(tick))) + 4 }, short));
        }
      });
      sweep.querySelector(".scroll").append(svg);
      sweep.hidden = false;
    }
  }
  // A click on the head of a column sorts the overview, which is also the table of a sweep.
  const body = document.querySelector("#overview tbody");
  document.querySelectorAll("#overview thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.ariaSort === "ascending" ? -1 : 1, key = (row) => row.cells[column].textContent.replaceAll(",", "");
      for (const other of head.parentElement.cells) other.ariaSort = null;
      head.ariaSort = down > 0 ? "ascending" : "descending";
      const order = ([a], [b]) => down * (a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b));
      body.append(...[...body.rows].map((row) => [key(row), row]).sort(order).map(([, row]) => row));
    });
  });
  root.dataset.drawn = Math.round(performance.now());
})();
