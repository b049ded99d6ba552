// Figures and numbers as files, made in the browser.

// What page.css says of a drawing, written into a copy that stands alone.
const DRAWN = [
  "fill", "fill-opacity", "font-family", "font-size", "font-weight", "opacity", "paint-order",
  "stroke", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "stroke-width",
];

function standalone(svg) {
  const copy = svg.cloneNode(true);
  const originals = svg.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((element, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of DRAWN) element.style.setProperty(name, style.getPropertyValue(name));
  });
  copy.querySelector(".cursor").remove();
  const { width, height } = svg.viewBox.baseVal;
  for (const [key, value] of Object.entries({ xmlns: svg.namespaceURI, width, height })) {
    copy.setAttribute(key, value);
  }
  const fill = getComputedStyle(document.body).backgroundColor;
  copy.prepend(node("rect", { width, height, fill }));
  return new XMLSerializer().serializeToString(copy);
}

async function asPng(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
  await image.decode();
  const canvas = node("canvas", { width: 2 * image.width, height: 2 * image.height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// A line for each row of each run; errors in the unit that the page shows.
function asCsv({ methods, axes, splits, unit }) {
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const columns = ["iteration", ...Object.keys(axes).filter((axis) => axis !== "iteration"), ...splits];
  const names = columns.map((name) => (splits.includes(name) && unit ? `${name} (${unit})` : name));
  const lines = methods.flatMap(({ label, runs }) =>
    runs.flatMap((run) =>
      run.iteration.map((_, i) => [quoted(label), run.seed, ...columns.map((c) => run[c][i] ?? "")]),
    ),
  );
  return [["method", "seed", ...names], ...lines].map((line) => line.join(",") + "\n").join("");
}

function save(name, blob) {
  const link = node("a", { download: name, href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// Buttons for a drawing as SVG and PNG, and for other files: {kind: [media type, text of it]}.
function downloads(svg, title, files) {
  const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const makers = {
    SVG: () => new Blob([standalone(svg)], { type: "image/svg+xml" }),
    PNG: () => asPng(svg),
    ...Object.fromEntries(
      Object.entries(files).map(([kind, [type, text]]) => [kind, () => new Blob([text()], { type })]),
    ),
  };
  const row = node("div", { class: "downloads" }, "Download");
  for (const [kind, make] of Object.entries(makers)) {
    const button = node("button", { type: "button" }, kind);
    button.addEventListener("click", async () => save(`${name}.${kind.toLowerCase()}`, await make()));
    row.append(button);
  }
  return row;
}
