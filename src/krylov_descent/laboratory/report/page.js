// What the page does with its data: convergence curves, the fan of Ritz values, light and dark.

// Radio buttons in a row; `options` maps values to what people read. One option is no choice.
function choice(title, options, chosen, change) {
  const group = node("fieldset", {}, node("legend", {}, title));
  const name = `choice-${document.querySelectorAll("fieldset").length}-${title}`;
  for (const [value, text] of Object.entries(options)) {
    const input = node("input", { type: "radio", name, value });
    input.checked = value === chosen;
    input.addEventListener("change", () => change(value));
    group.append(node("label", {}, input, node("span", {}, text)));
  }
  group.hidden = Object.keys(options).length < 2;
  return group;
}

// The index of the last x that is not beyond `x`; -1 before the first.
function lastUpTo(xs, x) {
  let found = -1;
  for (let i = 0; i < xs.length && xs[i] <= x; i++) found = i;
  return found;
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

// A method's curve over an axis: the median of its seeds with their range, or its only run.
function curve(method, axis, split) {
  if (!method.band) {
    const run = method.runs[method.line];
    const points = run[axis].map((x, i) => [x, run[split][i]]);
    return { points, dot: points[run.best] };
  }
  const { x, [split]: errors } = method.band[axis];
  const along = (values) => values.map((value, i) => [x[i], value]);
  return { points: along(errors.middle), low: along(errors.low), high: along(errors.high) };
}

function drawCurves(figure, data) {
  const split = data.splits.includes("test") ? "test" : data.splits[0] ?? "train";
  const state = { axis: "seconds", split, scale: "log", hidden: new Set() };
  const shown = () => data.methods.filter((method) => !state.hidden.has(method));
  const percent = (value) => number(value) + data.unit;

  // A method's error at x, and as text with the range of its seeds.
  const reading = (method, x) => {
    const { points, low, high } = curve(method, state.axis, state.split);
    const at = lastUpTo(points.map((point) => point[0]), x);
    const y = points[at]?.[1] ?? null;
    if (y === null) return [null, "–"];
    const range = low && low[at][1] !== high[at][1];
    return [y, percent(y) + (range ? ` (${percent(low[at][1])} – ${percent(high[at][1])})` : "")];
  };
  const target = data.target;
  const view = () => ({
    label: `${state.split} error over ${data.axes[state.axis]}, one curve for each method`,
    xLabel: data.axes[state.axis],
    yLabel: `${state.split} error${data.unit && ` in ${data.unit}`}`,
    yScale: state.scale === "log" ? logarithmic : linear,
    steps: true,
    curves: shown().map((method) => ({
      ...curve(method, state.axis, state.split),
      style: method.style,
      label: method.label,
    })),
    references: [
      ...data.published
        .filter((row) => row[state.split] > 0)
        .map((row) => ({
          value: row[state.split],
          label: `${row.method}, published: ${percent(row[state.split])}`,
          style: "reference",
        })),
      ...(target.value > 0 && target.split === state.split
        ? [{ value: target.value, label: `target ${percent(target.value)}`, style: "target" }]
        : []),
    ],
    describe: (x) => [
      `${number(x)} ${data.axes[state.axis]}`,
      ...shown()
        .map((method) => [method, ...reading(method, x)])
        .sort(([, a], [, b]) => (a ?? Infinity) - (b ?? Infinity))
        .map(([method, , text]) => [method.style, method.label, text]),
    ],
  });

  const set = (key) => (value) => {
    state[key] = value;
    if (key === "axis") chart.zoom = null;
    chart.draw();
  };
  const named = (names) => Object.fromEntries(names.map((name) => [name, name]));
  figure.append(
    node(
      "div",
      { class: "controls" },
      choice("Error", named(data.splits), state.split, set("split")),
      choice("Over", { ...data.axes, passes: "passes" }, state.axis, set("axis")),
      choice("Scale", { log: "log", linear: "linear" }, state.scale, set("scale")),
    ),
  );
  const chart = new Chart(figure, view);

  const legend = node("div", { class: "legend" });
  for (const method of data.methods) {
    const swatch = node("svg", { class: `swatch ${method.style}`, viewBox: "0 0 28 8" });
    swatch.append(node("path", { d: "M0 4H28" }));
    const button = node("button", { type: "button", "aria-pressed": "true" }, swatch);
    button.append(method.label + (method.note && ` (${method.note})`));
    button.addEventListener("click", () => {
      if (!state.hidden.delete(method)) state.hidden.add(method);
      button.setAttribute("aria-pressed", String(!state.hidden.has(method)));
      chart.draw();
    });
    legend.append(button);
  }
  const seeds = data.methods.some((method) => method.band);
  const thinned = data.methods.some(({ runs }) => runs.some((run) => run.rows > run.seconds.length));
  figure.append(
    legend,
    downloads(chart.svg, `${data.title} curves`, {
      CSV: ["text/csv", () => asCsv(data)],
      JSON: ["application/json", () => JSON.stringify(data)],
    }),
    node(
      "figcaption",
      {},
      `${capital(data.metric)}. An error holds until the next one is measured. `,
      seeds ? "With several seeds: the median in the band from the lowest to the highest. " : "",
      data.splits.includes("validation") && data.methods.some((method) => !method.band)
        ? "The dot is where the validation error was lowest. "
        : "",
      data.published.length ? "Dotted lines are published results. " : "",
      node(
        "span",
        { class: "hint" },
        "Drag across the figure to zoom in, double-click to zoom out; a name in the legend ",
        "switches its curve. ",
        thinned ? "The numbers are thinned; metrics.jsonl in a run's folder has all. " : "",
      ),
    ),
  );
}

// One curve for each rank: the largest eigenvalue of every step, the second largest, and so on.
function drawRitzValues(figure, data) {
  const runs = data.methods.filter(({ ritz }) => ritz).map(({ ritz }) => ritz);
  let run = runs[0];

  const view = () => {
    const { iteration, values } = run;
    const sizes = values.flat().map(Math.abs).filter((size) => size > 0);
    const largest = sizes.reduce((a, b) => Math.max(a, b), 0) || 1;
    // What is below rounding of the largest is noise: it is drawn at zero.
    const smallest = Math.max(sizes.reduce((a, b) => Math.min(a, b), largest), largest * 1e-10);
    const rank = Math.max(...values.map((row) => row.length));
    const curves = Array.from({ length: rank }, (_, k) => ({
      points: iteration.map((i, step) => [i, values[step][k] ?? null]),
      style: k === 0 ? "fan first" : "fan",
    }));
    return {
      label: `Ritz values of ${run.label} over iterations`,
      xLabel: "iterations",
      yLabel: "Ritz value",
      yScale: signedLogarithmic(smallest),
      steps: false,
      curves,
      references: [],
      describe(x) {
        const step = Math.max(0, lastUpTo(iteration, x));
        const row = values[step];
        const negative = row.filter((value) => value < 0).length;
        return [
          `Iteration ${iteration[step]}`,
          ["", "largest", number(row[0])],
          ["", "smallest", number(row[row.length - 1])],
          ["", `of ${row.length} are negative`, String(negative)],
        ];
      },
    };
  };

  const named = Object.fromEntries(runs.map((other, i) => [String(i), other.label]));
  const change = (value) => {
    run = runs[Number(value)];
    title.textContent = run.label;
    chart.zoomTo(null);
  };
  const title = node("b", {}, run.label);
  figure.append(node("div", { class: "controls" }, choice("Run", named, "0", change)));
  const chart = new Chart(figure, view);
  figure.append(
    downloads(chart.svg, `${data.title} Ritz values`, {}),
    node(
      "figcaption",
      {},
      title,
      ": eigenvalues of the curvature projected on each step's subspace, one curve for the largest ",
      "(bold), one for the second largest, and so on. The axis is logarithmic on both sides of zero; ",
      "below zero is negative curvature.",
    ),
  );
}

function drawFigure(figure) {
  const data = JSON.parse(figure.closest(".problem").querySelector("script.data").textContent);
  figure.replaceChildren(); // what stood there for those without scripts
  (figure.className === "curves" ? drawCurves : drawRitzValues)(figure, data);
}

// A figure in a folded section is drawn when that is opened.
for (const figure of document.querySelectorAll("figure.curves, figure.ritz")) {
  const closed = () => figure.closest("details:not([open])");
  const draw = () => {
    if (closed()) closed().addEventListener("toggle", draw, { once: true });
    else drawFigure(figure);
  };
  draw();
}

// A link into a folded section opens it.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let at = target?.closest("details"); at; at = at.parentElement.closest("details")) {
    at.open = true;
  }
  target?.scrollIntoView({ behavior: "instant" });
}
addEventListener("hashchange", openTarget);
document.addEventListener("click", (event) => {
  if (event.target.closest("a")?.hash === location.hash) openTarget(); // no change of the hash
});
if (location.hash) openTarget();

// Browsers offer the clipboard only to pages they trust; without it there is nothing to press.
for (const block of navigator.clipboard ? document.querySelectorAll("pre.command") : []) {
  const button = node("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.querySelector("code").textContent);
    button.textContent = "Copied";
  });
  block.append(button);
}

const theme = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "")) === "dark";
const nameTheme = () => (theme.textContent = isDark() ? "Light" : "Dark");
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});
system.addEventListener("change", nameTheme);
theme.hidden = false;
nameTheme();
