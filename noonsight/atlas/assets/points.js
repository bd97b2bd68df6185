/* The points of a chart. All of them are in the page; what is drawn keeps the minimum and the maximum of every pixel, so
   a spike of one step is always visible and zooming reveals every point. */
const noonPoints = (() => {
  "use strict";
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
  const decodeSteps = (steps) => steps.base64
    ? Float64Array.from(new Int32Array(bytes(steps.base64)))
    : Float64Array.from({ length: steps.count }, (_, i) => steps.first + i * steps.stride);
  const decode = (points) => ({ steps: decodeSteps(points.steps), values: new Float32Array(bytes(points.values)) });

  /** First index whose x is not below `value`. */
  function lowerBound(xs, value) {
    let low = 0, high = xs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < value) low = middle + 1; else high = middle;
    }
    return low;
  }

  /** Points [from, to) with at most two per pixel: the lowest and the highest, in their order. */
  function thin(xs, ys, from, to, pixels) {
    const outX = [], outY = [];
    if (to - from <= 2 * pixels) {
      for (let i = from; i < to; i++) { outX.push(xs[i]); outY.push(Number.isFinite(ys[i]) ? ys[i] : null); }
      return [outX, outY];
    }
    const start = xs[from], width = (xs[to - 1] - start) / pixels || 1;
    let index = from;
    while (index < to) {
      const pixel = Math.floor((xs[index] - start) / width);
      let low = -1, high = -1, first = index;
      for (; index < to && Math.floor((xs[index] - start) / width) === pixel; index++) {
        if (!Number.isFinite(ys[index])) continue;
        if (low < 0 || ys[index] < ys[low]) low = index;
        if (high < 0 || ys[index] > ys[high]) high = index;
      }
      const picked = low < 0 ? [first] : low === high ? [low] : [Math.min(low, high), Math.max(low, high)];
      for (const i of picked) { outX.push(xs[i]); outY.push(low < 0 ? null : ys[i]); }
    }
    return [outX, outY];
  }

  /** Mean weighted towards the latest `window` points; the raw line stays visible behind it. */
  function smoothed(values, window) {
    const out = new Float32Array(values.length);
    let mean = 0, weight = 0;
    const keep = 1 - 1 / window;
    for (let i = 0; i < values.length; i++) {
      if (Number.isFinite(values[i])) { mean = keep * mean + values[i]; weight = keep * weight + 1; }
      out[i] = weight ? mean / weight : NaN;
    }
    return out;
  }

  return { decode, lowerBound, thin, smoothed };
})();
