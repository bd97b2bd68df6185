/* The charts of a run page. One horizontal axis, one view and one cursor are shared by all of them: zooming one zooms
   all. Below, in order: axes, words, lines, drawing, reading, taking away, controls. */
(() => {
  "use strict";
  const source = document.getElementById("charts-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const state = { axis: "step", view: null, smooth: 0, ghosts: true };
  const plots = [];
  const { decode, lowerBound, thin, smoothed } = noonPoints;

  function secondsAt(table, step) {
    const { steps, seconds } = table;
    const right = Math.min(Math.max(lowerBound(steps, step), 1), steps.length - 1);
    if (steps.length < 2) return seconds[0] || 0;
    const share = (step - steps[right - 1]) / (steps[right] - steps[right - 1]);
    return seconds[right - 1] + share * (seconds[right] - seconds[right - 1]);
  }

  function toAxis(run, step) {
    const axis = data.axes[run];
    if (state.axis === "tokens") return (step + 1) * axis.tokens_per_step;
    if (state.axis === "time") return secondsAt(axis.time, step);
    return step;
  }

  const available = (name) => name === "step" || Object.values(data.axes)
    .every((axis) => (name === "tokens" ? axis.tokens_per_step : axis.time));

  // ---- words and colours ------------------------------------------------------------------------------------------
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const palette = (place) => css(`--line-${(place % 6) + 1}`);
  const font = (size) => `${size * devicePixelRatio}px ${css("--sans")}`;

  function figure(value) {
    if (value == null || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
    return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 5 : 4 });
  }

  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}B`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    if (size !== 0 && size < 1e-3) return `${+value.toPrecision(3)}`.includes("e") ? `${+value.toPrecision(3)}` : (+value.toPrecision(3)).toExponential();
    return `${+value.toPrecision(4)}`;
  }

  function clock(seconds) {
    const whole = Math.round(seconds);
    if (whole >= 3600) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
    return whole >= 60 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${whole} s`;
  }

  const round = (value) => [1, 2, 5].includes(+(value / 10 ** Math.floor(Math.log10(value) + 1e-9)).toFixed(3));
  const axisTick = (value) => (state.axis === "time" ? clock(value) : short(value));

  // ---- lines ------------------------------------------------------------------------------------------------------
  function lines(plot) {
    const found = [];
    plot.chart.series.forEach((series, place) => {
      if (plot.hidden.has(place)) return;
      const context = series.role === "context";
      const colour = () => (context ? css("--context") : palette(place));
      const raw = plot.points[place];
      const xs = raw.steps.map((step) => toAxis(series.run, step));
      if (state.ghosts) {
        for (const ghost of plot.ghosts[place]) {
          const ghostXs = ghost.steps.map((step) => toAxis(series.run, step));
          found.push({ ghost: true, xs: ghostXs, ys: ghost.values, colour: () => css("--ghost"), width: 3, series, steps: ghost.steps });
        }
      }
      const smooth = state.smooth && raw.values.length > 4 * state.smooth;
      const faint = smooth || context;
      found.push({ xs, ys: raw.values, steps: raw.steps, colour, faint, width: context ? 1 : 1.4, series, place });
      if (smooth) found.push({ xs, ys: smoothed(raw.values, state.smooth), steps: raw.steps, colour, width: 2, series, extra: true });
    });
    return found;
  }

  function whole(plot) {
    let low = Infinity, high = -Infinity;
    for (const line of plot.lines) {
      if (!line.xs.length) continue;
      low = Math.min(low, line.xs[0]);
      high = Math.max(high, line.xs[line.xs.length - 1]);
    }
    const of = data.axes[data.run] && data.axes[data.run].of;
    if (plot.main && of && state.axis !== "time") high = Math.max(high, toAxis(data.run, of - 1));
    return low < high ? [low, high] : [low - 0.5, low + 0.5];
  }

  function tables(plot, view, pixels) {
    const drawn = plot.lines.map((line) => {
      const from = Math.max(0, lowerBound(line.xs, view[0]) - 1);
      const to = Math.min(line.xs.length, lowerBound(line.xs, view[1]) + 2);
      return from < to ? thin(line.xs, line.ys, from, to, pixels) : [[view[0]], [null]];
    });
    return drawn.length ? uPlot.join(drawn) : [[view[0], view[1]]];
  }

  // ---- drawing ----------------------------------------------------------------------------------------------------
  function verticalRange(plot) {
    return (u, low, high) => {
      if (low == null || high == null) return plot.log ? [0.1, 1] : [0, 1];
      for (const point of bandPoints(plot)) {
        if (point.x < u.scales.x.min || point.x > u.scales.x.max) continue;
        low = Math.min(low, point.low);
        high = Math.max(high, point.high);
      }
      if (plot.log) return [low / 1.06, high * 1.06];
      const margin = (high - low) * 0.06 || Math.abs(high) * 0.02 || 0.5;
      return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
    };
  }

  function clipped(u, paint, margin = 0) {
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width + margin * devicePixelRatio, u.bbox.height);
    u.ctx.clip();
    paint(u.ctx);
    u.ctx.restore();
  }

  /** Where the forecast put the loss, on the axis of the moment. */
  function bandPoints(plot) {
    const band = plot.chart.band;
    if (!band) return [];
    return band.steps.map((step, i) => ({ x: toAxis(data.run, step), low: band.low[i], median: band.median[i], high: band.high[i], seen: band.seen[i] }));
  }

  function drawBand(plot, u) {
    const points = bandPoints(plot);
    if (!points.length) return;
    const x = (point) => u.valToPos(point.x, "x", true), y = (value) => u.valToPos(value, "y", true);
    clipped(u, (ctx) => {
      ctx.fillStyle = css("--tint");
      ctx.beginPath();
      points.forEach((point) => ctx.lineTo(x(point), y(point.high)));
      points.slice().reverse().forEach((point) => ctx.lineTo(x(point), y(point.low)));
      ctx.fill();
    });
  }

  /** Over the line, so that both can be seen: the median of the band, and the sights taken along the way. */
  function drawSights(plot, u) {
    const points = bandPoints(plot);
    const x = (point) => u.valToPos(point.x, "x", true), y = (value) => u.valToPos(value, "y", true);
    clipped(u, (ctx) => {
      ctx.lineWidth = devicePixelRatio;
      ctx.strokeStyle = css("--ink");
      for (const side of ["low", "high"]) {
        ctx.globalAlpha = 0.35;
        ctx.beginPath();
        points.forEach((point) => ctx.lineTo(x(point), y(point[side])));
        ctx.stroke();
      }
      ctx.globalAlpha = 1;
      ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      points.forEach((point) => ctx.lineTo(x(point), y(point.median)));
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.fillStyle = css("--paper");
      ctx.lineWidth = 2 * devicePixelRatio;
      for (const point of points) {
        if (point.seen == null) continue;
        ctx.beginPath();
        ctx.arc(x(point), y(point.seen), 4 * devicePixelRatio, 0, 7);
        ctx.fill();
        ctx.stroke();
      }
    }, 6);
  }

  function drawMarks(plot, u) {
    clipped(u, (ctx) => {
      ctx.font = font(11);
      const taken = [];  // where words stand already
      for (const mark of data.marks) {
        const x = Math.round(u.valToPos(toAxis(data.run, mark.step), "x", true));
        const reach = 5 * devicePixelRatio;
        ctx.strokeStyle = ctx.fillStyle = css(mark.planned ? "--watch" : "--bad");
        ctx.lineWidth = devicePixelRatio;
        ctx.beginPath();
        ctx.moveTo(x, u.bbox.top);
        ctx.lineTo(x, u.bbox.top + u.bbox.height);
        ctx.stroke();
        ctx.beginPath();
        ctx.moveTo(x - reach, u.bbox.top);
        ctx.lineTo(x + reach, u.bbox.top);
        ctx.lineTo(x, u.bbox.top + 1.5 * reach);
        ctx.fill();
        const width = ctx.measureText(mark.text).width + 2 * reach;
        const left = x - width > u.bbox.left, right = x + width < u.bbox.left + u.bbox.width;
        const span = right ? [x, x + width] : [x - width, x];
        const free = taken.every(([from, to]) => span[1] < from || span[0] > to);
        if (plot.main && (left || right) && free) {  // where there is no room, the table of incidents says it
          taken.push(span);
          ctx.textAlign = right ? "left" : "right";
          ctx.fillText(mark.text, x + (right ? 2 : -2) * reach, u.bbox.top + 3 * reach);
        }
      }
    });
    if (plot.main) {
      drawEnds(plot, u);
      drawSights(plot, u);
    }
  }

  function drawEnds(plot, u) {
    clipped(u, (ctx) => {
      ctx.fillStyle = css("--soft");
      for (const line of plot.lines) {
        const last = line.xs.length - 1;
        if (line.series.role !== "context" || line.extra || last < 0 || !Number.isFinite(line.ys[last])) continue;
        ctx.beginPath();
        ctx.arc(u.valToPos(line.xs[last], "x", true), u.valToPos(line.ys[last], "y", true), 2.5 * devicePixelRatio, 0, 7);
        ctx.fill();
      }
    });
  }

  function options(plot) {
    const axis = () => css("--soft");
    const grid = { stroke: () => css("--faint"), width: 1 };
    const common = { stroke: axis, grid, ticks: { show: false }, font: `11px ${css("--sans")}` };
    return {
      width: plot.holder.clientWidth, height: plot.holder.clientHeight, legend: { show: false }, padding: [8, 8, 0, 0],
      cursor: {
        y: false, points: { show: false }, drag: { x: true, y: false, setScale: false },
        sync: { key: "page", setSeries: false, scales: ["x", null] },
        bind: { dblclick: () => () => setView(null) },
      },
      scales: { x: { time: false, auto: false }, y: { distr: plot.log ? 3 : 1, range: verticalRange(plot) } },
      axes: [
        { ...common, values: (_, ticks) => ticks.map(axisTick), space: state.axis === "time" ? 90 : 60, size: 28, gap: 4 },
        { ...common, values: (_, ticks) => ticks.map((tick) => (tick == null || (plot.log && !round(tick)) ? "" : short(tick))), size: 52, gap: 4, space: 32, filter: (_, splits) => splits },
      ],
      series: [{}, ...plot.lines.map((line) => ({
        stroke: () => line.colour(), width: line.width, alpha: line.faint ? 0.45 : plot.main && !line.extra && !line.ghost ? 0.75 : 1, spanGaps: false,
        points: { show: line.xs.length < 40 && !line.extra, size: 6 },
      }))],
      hooks: {
        drawClear: [(u) => drawBand(plot, u)],
        draw: [(u) => drawMarks(plot, u)],
        setCursor: [(u) => read(plot, u)],
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width < 4) return;
          setView([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
        }],
      },
    };
  }

  function build(plot) {
    if (plot.u) plot.u.destroy();
    plot.holder.replaceChildren();
    plot.lines = lines(plot);
    const view = state.view || whole(plot);
    plot.u = new uPlot(options(plot), tables(plot, view, plot.holder.clientWidth), plot.holder);
    plot.u.setScale("x", { min: view[0], max: view[1] });
  }

  function show(plot) {
    if (!plot.u) return;
    const view = state.view || whole(plot);
    plot.u.batch(() => {
      plot.u.setData(tables(plot, view, plot.holder.clientWidth), false);
      plot.u.setScale("x", { min: view[0], max: view[1] });
      plot.u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    });
  }

  function setView(view) {
    state.view = view;
    plots.forEach(show);
  }

  function zoom(factor) {
    const main = plots.find((plot) => plot.u);
    if (!main) return;
    const limit = whole(main), view = state.view || limit;
    const middle = main.u.cursor.left >= 0 ? main.u.posToVal(main.u.cursor.left, "x") : (view[0] + view[1]) / 2;
    const next = [Math.max(limit[0], middle - (middle - view[0]) * factor), Math.min(limit[1], middle + (view[1] - middle) * factor)];
    setView(next[0] <= limit[0] && next[1] >= limit[1] ? null : next);
  }

  // ---- reading ----------------------------------------------------------------------------------------------------
  function read(plot, u) {
    const left = u.cursor.left;
    if (left == null || left < 0) { plot.reading.textContent = plot.rest; return; }
    const x = u.posToVal(left, "x"), parts = [];
    let step = null;
    for (const line of plot.lines) {
      if (line.ghost || line.extra || !line.xs.length) continue;
      const right = lowerBound(line.xs, x);
      if (right === line.xs.length && x > line.xs[right - 1] + (line.xs[right - 1] - line.xs[0]) * 0.02) continue;
      const near = right > 0 && (right === line.xs.length || x - line.xs[right - 1] < line.xs[right] - x) ? right - 1 : right;
      if (step === null && line.series.role === "own") step = line.steps[near];
      parts.push(`${plot.chart.series.length > 1 ? `${line.series.label} ` : ""}${figure(line.ys[near])}`);
    }
    const where = state.axis === "time" ? clock(x) : `${short(x)} tokens`;
    const place = step === null ? axisTick(x) : `step ${step.toLocaleString("en")}${state.axis === "step" ? "" : `, ${where}`}`;
    const mark = data.marks.find((each) => Math.abs(u.valToPos(toAxis(data.run, each.step), "x") - left) < 6);
    plot.reading.textContent = `${place}: ${parts.join(" · ")}${mark ? ` · ${mark.text}` : ""}`;
  }

  // ---- taking away ------------------------------------------------------------------------------------------------
  function save(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  const fileName = (plot, ending) => `${document.body.dataset.name}-${plot.chart.id}.${ending}`.replace(/[^\w.@-]+/g, "_");

  function toPng(plot) {
    const drawn = plot.u.ctx.canvas, head = 34 * devicePixelRatio;
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [drawn.width, drawn.height + head];
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = css("--paper");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.fillStyle = css("--ink");
    ctx.font = font(14);
    ctx.fillText(`${plot.chart.title}${plot.chart.unit ? `, ${plot.chart.unit}` : ""} (${document.body.dataset.name})`, 12 * devicePixelRatio, head * 0.66);
    ctx.drawImage(drawn, 0, head);
    canvas.toBlob((blob) => save(fileName(plot, "png"), blob));
  }

  function csv(plot) {
    const quote = (text) => `"${`${text}`.replace(/^([=+\-@])/, "'$1").replace(/"/g, '""')}"`;
    const rows = ["run,series,line,step,value"];
    plot.chart.series.forEach((series, place) => {
      const write = (points, line) => points.steps.forEach((step, i) => rows.push(`${quote(series.run)},${quote(series.label)},${line},${step},${points.values[i]}`));
      write(plot.points[place], "surviving");
      plot.ghosts[place].forEach((ghost) => write(ghost, "replaced"));
    });
    return rows.join("\n") + "\n";
  }

  // ---- controls ---------------------------------------------------------------------------------------------------
  const ACTIONS = {
    log: (plot, button) => { plot.log = !plot.log; button.setAttribute("aria-pressed", plot.log); build(plot); },
    png: (plot) => toPng(plot),
    csv: (plot) => save(fileName(plot, "csv"), new Blob([csv(plot)], { type: "text/csv" })),
  };

  function keys(plot, event) {
    const u = plot.u;
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const width = u.over.clientWidth, here = u.cursor.left >= 0 ? u.cursor.left : width;
    const jump = event.shiftKey ? width / 10 : 2;
    const moves = { ArrowLeft: -jump, ArrowRight: jump, Home: -width, End: width };
    if (event.key in moves) {
      plot.reading.setAttribute("aria-live", "polite");
      u.setCursor({ left: Math.min(width, Math.max(0, here + moves[event.key])), top: 10 });
    } else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0" || event.key === "Escape") setView(null);
    else if (event.key === "l") plot.figure.querySelector('[data-do="log"]').click();
    else return;
    event.preventDefault();
  }

  function legend(plot) {
    if (plot.chart.series.length < 2 || plot.main) return;
    plot.chart.series.forEach((series, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = series.label;
      button.style.setProperty("--mark", `var(--line-${(place % 6) + 1})`);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        if (!plot.hidden.delete(place)) plot.hidden.add(place);
        button.setAttribute("aria-pressed", !plot.hidden.has(place));
        build(plot);
      });
      plot.figure.querySelector(".legend").append(button);
    });
  }

  function prepare(element) {
    const chart = data.charts.find((item) => item.id === element.dataset.chart);
    const find = (selector) => element.querySelector(selector);
    const plot = { chart, figure: element, holder: find(".plot"), reading: find(".reading"), rest: find(".reading").textContent,
      log: chart.log, hidden: new Set(), main: chart.id === "main", lines: [], u: null };
    plot.points = chart.series.map(decode);
    plot.ghosts = chart.series.map((series) => series.ghosts.map(decode));
    find('[data-do="log"]').setAttribute("aria-pressed", plot.log);
    element.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", () => ACTIONS[button.dataset.do](plot, button)));
    plot.holder.addEventListener("keydown", (event) => keys(plot, event));
    legend(plot);
    plots.push(plot);
    new IntersectionObserver((seen, watcher) => {
      if (!seen.some((item) => item.isIntersecting)) return;
      watcher.disconnect();
      if (!plot.u) build(plot);
    }, { rootMargin: "400px" }).observe(element);
    new ResizeObserver(() => {
      if (!plot.u || plot.u.width === plot.holder.clientWidth) return;
      plot.u.setSize({ width: plot.holder.clientWidth, height: plot.holder.clientHeight });
      show(plot);
    }).observe(plot.holder);
  }

  const rebuild = () => plots.forEach((plot) => plot.u && build(plot));
  document.querySelectorAll("figure[data-chart]").forEach(prepare);
  document.querySelectorAll('input[name="axis"]').forEach((input) => {
    input.disabled = !available(input.value);
    input.addEventListener("change", () => { state.axis = input.value; state.view = null; rebuild(); });
  });
  document.getElementById("smooth").addEventListener("change", (event) => { state.smooth = +event.target.value; rebuild(); });
  document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => {
    if (button.dataset.zoom === "all") setView(null); else zoom(+button.dataset.zoom);
  }));
  document.querySelector(".controls").hidden = false;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
  addEventListener("beforeprint", () => { document.documentElement.classList.add("printing"); plots.forEach(build); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("printing"); rebuild(); });
  window.noonsight = { thin, csv, plots, state, setView, zoom };
})();
