"use strict";
// Draws every chart of the report, in the reader's light or dark mode, and hands out its image and data.
const themes = JSON.parse(document.getElementById("lk-themes").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function save(name, url) {
  const link = document.createElement("a");
  link.download = name;
  link.href = url;
  document.body.append(link);
  link.click();
  link.remove();
}

async function draw(figure, mode) {
  const holder = figure.querySelector(".lk-chart");
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const look = themes[mode];
  const columns = holder.clientWidth < 480 ? 1 : look.legend.columns;
  if (figure.view) figure.view.finalize();
  const result = await vegaEmbed(holder, { ...spec, width: "container" }, {
    actions: false,
    ast: true, // the expression interpreter: the content security policy forbids compiling code
    config: { ...look, legend: { ...look.legend, columns } },
    mode: "vega-lite",
    renderer: "svg",
    tooltip: { theme: mode },
  });
  figure.view = result.view;
  figure.spec = spec;
}

// The rows behind a chart as CSV; a row that holds a list of moments gives one line each.
function csv(spec) {
  const moments = spec.usermeta.labkit.moments;
  const rows = spec.datasets[spec.data.name].flatMap(({ moments: lists, ...row }) =>
    lists ? lists.map((list) => ({ ...row, ...Object.fromEntries(moments.map((name, i) => [name, list[i]])) })) : [row],
  );
  const names = [...new Set(rows.flatMap(Object.keys))];
  const quoted = (value) => {
    const text = String(value ?? "");
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [names, ...rows.map((row) => names.map((name) => row[name]))].map((line) => line.map(quoted).join(",")).join("\r\n");
}

async function handOut(figure, kind) {
  const name = `${figure.id}.${kind}`;
  if (kind === "csv") {
    const url = URL.createObjectURL(new Blob([csv(figure.spec)], { type: "text/csv" }));
    save(name, url);
    URL.revokeObjectURL(url);
  } else {
    save(name, await figure.view.toImageURL(kind, kind === "png" ? 2 : 1));
  }
}

const figures = [...document.querySelectorAll(".lk-figure")];
async function drawAll() {
  const root = document.documentElement.dataset;
  const mode = dark.matches ? "dark" : "light";
  delete root.charts;
  for (const figure of figures) {
    try {
      await draw(figure, mode);
    } catch (error) {
      figure.querySelector(".lk-chart").textContent = `This chart could not be drawn: ${error.message}`;
      console.error(error);
    }
  }
  root.charts = "drawn";
  root.mode = mode;
}

for (const figure of figures) {
  for (const button of figure.querySelectorAll("button[data-kind]")) {
    button.addEventListener("click", () => handOut(figure, button.dataset.kind));
  }
}
const codeButton = document.getElementById("lk-code-button");
function showCode(shown) {
  document.documentElement.dataset.code = shown ? "shown" : "hidden";
  codeButton.setAttribute("aria-pressed", String(shown));
  codeButton.textContent = shown ? "Hide code" : "Show code";
  for (const details of document.querySelectorAll("details.lk-code")) details.open = shown;
}
codeButton.addEventListener("click", () => showCode(codeButton.getAttribute("aria-pressed") !== "true"));
showCode(false);
dark.addEventListener("change", drawAll);
drawAll();
