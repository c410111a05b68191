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

async function draw(figure) {
  const holder = figure.querySelector(".lk-chart");
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const mode = dark.matches ? "dark" : "light";
  if (figure.view) figure.view.finalize();
  const result = await vegaEmbed(holder, { ...spec, width: "container" }, {
    actions: false,
    ast: true, // the expression interpreter: the content security policy forbids compiling code
    config: themes[mode],
    renderer: "svg",
    tooltip: { theme: mode },
  });
  figure.view = result.view;
  figure.csv = spec.data.values;
}

async function handOut(figure, kind) {
  const name = `${figure.id}.${kind}`;
  if (kind === "csv") {
    const url = URL.createObjectURL(new Blob([figure.csv], { type: "text/csv" }));
    save(name, url);
    URL.revokeObjectURL(url);
  } else {
    save(name, await figure.view.toImageURL(kind, kind === "png" ? 2 : 1));
  }
}

const figures = [...document.querySelectorAll(".lk-figure")];
async function drawAll() {
  for (const figure of figures) {
    try {
      await draw(figure);
    } catch (error) {
      figure.querySelector(".lk-chart").textContent = `This chart could not be drawn: ${error.message}`;
      console.error(error);
    }
  }
  document.documentElement.dataset.charts = "drawn";
}

for (const figure of figures) {
  for (const button of figure.querySelectorAll("button[data-kind]")) {
    button.addEventListener("click", () => handOut(figure, button.dataset.kind));
  }
}
const allCode = document.getElementById("lk-all-code");
allCode.addEventListener("click", () => {
  const open = allCode.getAttribute("aria-pressed") !== "true";
  allCode.setAttribute("aria-pressed", String(open));
  allCode.textContent = open ? "Hide all code" : "Show all code";
  for (const details of document.querySelectorAll("details.lk-code")) details.open = open;
});
dark.addEventListener("change", drawAll);
drawAll();
