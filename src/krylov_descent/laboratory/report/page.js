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

function drawCurves(figure, data) {
  const split = data.splits.includes("test") ? "test" : data.splits[0] ?? "train";
  const state = { axis: "seconds", split, scale: "log", hidden: new Set() };
  const shown = () => data.runs.filter((run) => !state.hidden.has(run));
  const percent = (value) => number(value) + data.unit;

  const view = () => ({
    label: `${state.split} error over ${data.axes[state.axis]}, one curve for each run`,
    xLabel: data.axes[state.axis],
    yLabel: `${state.split} error${data.unit && ` in ${data.unit}`}`,
    yScale: state.scale === "log" ? logarithmic : linear,
    curves: shown().map((run) => {
      const points = run[state.axis].map((x, i) => [x, run[state.split][i]]);
      return { points, style: run.style, dot: points[run.best] };
    }),
    references: data.published
      .filter((row) => row[state.split] > 0)
      .map((row) => ({
        value: row[state.split],
        label: `${row.method}, published: ${percent(row[state.split])}`,
      })),
    describe: (x) => [
      `${number(x)} ${data.axes[state.axis]}`,
      ...shown()
        .map((run) => [run, run[state.split][lastUpTo(run[state.axis], x)] ?? null])
        .sort(([, a], [, b]) => (a ?? Infinity) - (b ?? Infinity))
        .map(([run, y]) => [run.style, run.label, y === null ? "–" : percent(y)]),
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
  for (const run of data.runs) {
    const swatch = node("svg", { class: `swatch ${run.style}`, viewBox: "0 0 28 8" });
    swatch.append(node("path", { d: "M0 4H28" }));
    const note = run.state === "finished" ? "" : ` (${run.state})`;
    const button = node("button", { type: "button", "aria-pressed": "true" }, swatch);
    button.append(run.label + note);
    button.addEventListener("click", () => {
      if (!state.hidden.delete(run)) state.hidden.add(run);
      button.setAttribute("aria-pressed", String(!state.hidden.has(run)));
      chart.draw();
    });
    legend.append(button);
  }
  figure.append(
    legend,
    node(
      "figcaption",
      {},
      `${capital(data.metric)}. `,
      data.splits.includes("validation") ? "The dot is where the validation error was lowest. " : "",
      data.published.length ? "Dotted lines are published results. " : "",
      node(
        "span",
        { class: "hint" },
        "Drag across the figure to zoom in, double-click to zoom out; a name in the legend ",
        "switches its curve.",
      ),
    ),
  );
}

// One curve for each rank: the largest eigenvalue of every step, the second largest, and so on.
function drawRitzValues(figure, data) {
  const runs = data.runs.filter((run) => run.ritz);
  let run = runs[0];

  const view = () => {
    const { iteration, values } = run.ritz;
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

for (const section of document.querySelectorAll("section.problem")) {
  const data = JSON.parse(section.querySelector("script.data").textContent);
  const curves = section.querySelector("figure.curves");
  const ritz = section.querySelector("figure.ritz");
  if (curves) drawCurves(curves, data);
  if (ritz) drawRitzValues(ritz, data);
}

// Browsers offer the clipboard only to pages they trust; without it there is nothing to press.
for (const block of navigator.clipboard ? document.querySelectorAll(".commands pre") : []) {
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
