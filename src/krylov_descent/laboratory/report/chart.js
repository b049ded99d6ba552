// A line chart in SVG: axes, zoom by dragging, values under the pointer. It knows nothing of runs.

function node(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "circle", "text", "clipPath", "defs"];
  const made = svg.includes(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

class Chart {
  // `label` is for those who do not see it. `view()` gives what to draw now: xLabel, yLabel, yScale,
  // curves [{points: [[x, y or null]], style, label at its end, dot: [x, y], and low and high of a
  // band, as points}], references [{value, label, style}], and describe(x), the text lines under
  // the pointer as [style, name, value], title first. With `steps` a value holds until the next one.
  constructor(host, view) {
    this.view = view;
    this.zoom = null;
    this.svg = node("svg", { class: "chart", tabindex: "0", role: "img" });
    this.tooltip = node("div", { class: "tooltip", role: "status", hidden: "" });
    this.reset = node("button", { type: "button", class: "reset", hidden: "" }, "Reset zoom");
    this.reset.addEventListener("click", () => this.zoomTo(null));
    this.clip = `clip-${document.querySelectorAll("svg.chart").length}`;
    host.append(node("div", { class: "plot" }, this.svg, this.tooltip, this.reset));
    this.listen();
    new ResizeObserver(() => this.draw()).observe(host);
    this.draw();
  }

  draw() {
    const view = (this.now = this.view());
    const width = Math.max(280, this.svg.parentNode.clientWidth);
    const height = width < 600 ? 300 : 420;
    // The names at the curves' ends have room for the longest, as far as the screen goes.
    const longest = Math.max(0, ...view.curves.map(({ label }) => (label ?? "").length));
    this.letters = Math.min(longest, width < 600 ? 12 : 26);
    const margin = longest ? 18 + 7.4 * this.letters : 10;
    this.box = { left: 54, right: width - margin, top: 12, bottom: height - 42 };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("aria-label", view.label);
    this.reset.hidden = this.zoom === null;
    this.fit(view);
    this.cursor = node("g", { class: "cursor" });
    const { left, right, top, bottom } = this.box;
    const [lines, names] = this.references(view);
    const frame = { x: left, y: top, width: right - left, height: bottom - top };
    this.svg.replaceChildren(
      node("defs", {}, node("clipPath", { id: this.clip }, node("rect", frame))),
      node("rect", { class: "paper", ...frame }),
      ...this.axes(view),
      ...lines,
      node("g", { "clip-path": `url(#${this.clip})` }, ...this.curves(view)),
      ...names,
      ...this.labels(view),
      this.cursor,
    );
    this.point(null); // what it showed may be of another axis
  }

  // The window: all of x or what was zoomed to, and the y of what is visible in it.
  fit({ curves, references, yScale }) {
    const all = curves
      .flatMap(({ points, low = [], high = [] }) => [...points, ...low, ...high])
      .filter((p) => p[1] !== null);
    const end = Math.max(0, ...all.map((p) => p[0])) || 1;
    this.x = this.zoom ?? [0, 1.01 * end]; // room for a dot at the end
    const inside = all.filter((p) => p[0] >= this.x[0] && p[0] <= this.x[1]);
    let values = (inside.length ? inside : all).map((p) => p[1]);
    if (!this.zoom) values.push(...references.map((reference) => reference.value));
    if (yScale === logarithmic) values = values.filter((value) => value > 0);
    if (!values.length) values = [1];
    const low = values.reduce((a, b) => Math.min(a, b));
    const high = values.reduce((a, b) => Math.max(a, b));
    this.y = yScale.range(low, high);
  }

  across(x) {
    const { left, right } = this.box;
    return left + ((x - this.x[0]) / (this.x[1] - this.x[0])) * (right - left);
  }

  up(y) {
    const { top, bottom } = this.box;
    const share = (this.now.yScale.place(y) - this.y[0]) / (this.y[1] - this.y[0]);
    return bottom - Math.max(share, 0) * (bottom - top);
  }

  axes(view) {
    const { left, right, top, bottom } = this.box;
    const drawn = [];
    for (const value of linear.ticks(...this.x, (right - left) / 90)) {
      const x = this.across(value);
      drawn.push(
        node("line", { class: "grid", x1: x, x2: x, y1: top, y2: bottom }),
        node("text", { x, y: bottom + 16, "text-anchor": "middle" }, number(value, 6)),
      );
    }
    for (const value of view.yScale.ticks(...this.y, (bottom - top) / 40)) {
      const y = this.up(value);
      drawn.push(
        node("line", { class: value ? "grid" : "grid zero", x1: left, x2: right, y1: y, y2: y }),
        node("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, number(value, 6)),
      );
    }
    const middle = (top + bottom) / 2;
    const upright = { x: 11, y: middle, transform: `rotate(-90 11 ${middle})` };
    drawn.push(
      node("text", { class: "axis", x: right, y: bottom + 34, "text-anchor": "end" }, view.xLabel),
      node("text", { class: "axis", "text-anchor": "middle", ...upright }, view.yLabel),
    );
    return drawn;
  }

  curves({ curves }) {
    const bands = curves.filter(({ low }) => low).flatMap(({ low, high, style }) => {
      const edges = this.pieces(high);
      return this.pieces(low).map((piece, i) => {
        const outline = [...edges[i], ...piece.reverse()].join("L");
        return node("path", { class: `band ${style}`, d: `M${outline}Z` });
      });
    });
    const lines = curves.flatMap(({ points, style, dot }) => {
      // h0: a point alone is a dot
      const path = this.pieces(points).map((piece) => `M${piece.join("L")}h0`);
      const drawn = [node("path", { class: `curve ${style}`, d: path.join("") })];
      if (dot && dot[1] !== null) {
        const at = { cx: this.across(dot[0]), cy: this.up(dot[1]), r: 4.5 };
        drawn.push(node("circle", { class: `dot ${style}`, ...at }));
      }
      return drawn;
    });
    return [...bands, ...lines];
  }

  // The corners of what is drawn through points; the pen is lifted where a number is missing.
  pieces(points) {
    const pieces = [];
    let before = null; // the height of what is being drawn
    for (const [x, y] of points) {
      const across = this.across(x).toFixed(1);
      if (before !== null && this.now.steps) pieces.at(-1).push(`${across} ${before}`);
      if (before === null && y !== null) pieces.push([]);
      before = y === null ? null : this.up(y).toFixed(1);
      if (before !== null) pieces.at(-1).push(`${across} ${before}`);
    }
    return pieces;
  }

  // Each curve's name where it leaves the window, pushed apart where they collide.
  labels({ curves }) {
    const { right, bottom } = this.box;
    const height = 14;
    const ends = curves.flatMap(({ label, points, style }) => {
      const seen = points.filter((p) => p[1] !== null && p[0] <= this.x[1]);
      if (!label || !seen.length) return [];
      const [x, y] = seen.at(-1);
      const leaves = seen.length < points.length ? right : this.across(x);
      return leaves < this.box.left ? [] : [{ label, style, x: leaves, y: this.up(y) }];
    });
    ends.sort((a, b) => a.y - b.y);
    ends.forEach((end, i) => (end.at = i ? Math.max(end.y, ends[i - 1].at + height) : end.y));
    ends.reduceRight((lowest, end) => (end.at = Math.min(end.at, lowest)) - height, bottom);
    return ends.flatMap(({ label, style, x, y, at }) => {
      const cut = label.length > this.letters ? `${label.slice(0, this.letters - 1)}…` : label;
      const leader = `M${x.toFixed(1)} ${y.toFixed(1)}H${right}L${right + 8} ${at.toFixed(1)}`;
      return [
        node("path", { class: `leader ${style}`, d: leader }),
        node("text", { class: `label ${style}`, x: right + 12, y: at + 4 }, cut),
      ];
    });
  }

  // Horizontal lines, and their names above them at the left, pushed apart where they collide.
  references({ references }) {
    const { left, right, top, bottom } = this.box;
    let free = Infinity;
    const [lines, names] = [[], []];
    references
      .map(({ value, label, style }) => ({ y: this.up(value), label, style }))
      .filter(({ y }) => y > top && y < bottom)
      .sort((a, b) => b.y - a.y)
      .forEach(({ y, label, style }) => {
        const at = Math.min(y - 3, free);
        free = at - 13;
        lines.push(node("line", { class: style, x1: left, x2: right, y1: y, y2: y }));
        names.push(node("text", { class: style, x: left + 6, y: at }, label));
      });
    return [lines, names];
  }

  zoomTo(range) {
    this.zoom = range;
    this.draw();
  }

  // Show the values at x; null for none.
  point(x) {
    this.at = x;
    this.cursor.replaceChildren();
    this.tooltip.hidden = x === null;
    if (x === null) return;
    const { left, right, top, bottom } = this.box;
    const at = this.across(x);
    this.cursor.append(node("line", { x1: at, x2: at, y1: top, y2: bottom }));
    const [title, ...rows] = this.now.describe(x);
    const lines = rows.map(([style, name, value]) => {
      const path = node("path", { d: "M0 4H28" });
      const swatch = node("svg", { class: `swatch ${style}`, viewBox: "0 0 28 8" }, path);
      return node("p", {}, ...(style ? [swatch] : []), node("b", {}, value), " " + name);
    });
    this.tooltip.replaceChildren(node("p", {}, title), ...lines);
    // The drawing is scaled with the page; the tooltip stands beside the line, on its roomier side.
    const share = this.svg.clientWidth / this.svg.viewBox.baseVal.width;
    const onLeft = at > (left + right) / 2;
    this.tooltip.style.left = onLeft ? "auto" : `${at * share + 12}px`;
    this.tooltip.style.right = onLeft ? `${this.svg.clientWidth - at * share + 12}px` : "auto";
  }

  listen() {
    let start = null; // where a drag began, in x
    const under = (event) => {
      const area = this.svg.getBoundingClientRect();
      const width = this.svg.viewBox.baseVal.width;
      const { left, right } = this.box;
      const at = ((event.clientX - area.left) / area.width) * width;
      const share = Math.min(Math.max((at - left) / (right - left), 0), 1);
      return this.x[0] + share * (this.x[1] - this.x[0]);
    };
    // A drag of a few pixels is a shaky click.
    const wide = (x) => Math.abs(this.across(x) - this.across(start)) > 8;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button === 0) start = under(event);
    });
    this.svg.addEventListener("pointermove", (event) => start === null && this.point(under(event)));
    this.svg.addEventListener("pointerleave", (event) => {
      // A finger leaves when it is lifted: what it pointed at stays until it taps elsewhere.
      if (start === null && event.pointerType !== "touch") this.point(null);
    });
    addEventListener("pointerdown", (event) => {
      if (!this.svg.contains(event.target)) this.point(null);
    });
    this.svg.addEventListener("dblclick", () => this.zoomTo(null));
    addEventListener("pointermove", (event) => {
      if (start === null || !wide(under(event))) return;
      this.point(null);
      const [a, b] = [this.across(start), this.across(under(event))].sort((p, q) => p - q);
      const { top, bottom } = this.box;
      const band = { x: a, width: b - a, y: top, height: bottom - top, class: "selection" };
      this.cursor.replaceChildren(node("rect", band));
    });
    addEventListener("pointerup", (event) => {
      if (start === null) return;
      const end = under(event);
      if (wide(end)) this.zoomTo([Math.min(start, end), Math.max(start, end)]);
      else this.point(end);
      start = null;
    });
    addEventListener("pointercancel", () => {
      if (start !== null) this.point((start = null)); // the page scrolls instead
    });
    this.svg.addEventListener("keydown", (event) => {
      const [from, to] = this.x;
      const at = this.at ?? (from + to) / 2;
      const move = (share) => this.point(Math.min(Math.max(at + share * (to - from), from), to));
      const narrow = () => this.zoomTo([(from + at) / 2, (to + at) / 2]);
      const actions = {
        ArrowLeft: () => move(-0.02),
        ArrowRight: () => move(0.02),
        "+": narrow,
        "-": () => this.zoomTo(null),
        Escape: () => this.zoomTo(null),
      };
      if (!(event.key in actions)) return;
      event.preventDefault();
      actions[event.key]();
    });
  }
}
