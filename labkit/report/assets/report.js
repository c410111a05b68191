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

// The charts' library: once unpacked a script like any other, which the policy knows by its hash.
let unpacking;
async function unpack() {
  const packed = document.getElementById("lk-bundle").textContent;
  const bytes = Uint8Array.from(atob(packed), (each) => each.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(unpacked).text();
  document.head.append(library);
}

async function draw(figure, mode) {
  await (unpacking ??= unpack());
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

// A cell that a spreadsheet would take for a formula begins with an apostrophe instead.
const harmless = (text) => (/^[=＝+＋\-－@＠\t\r]/.test(text) && !/^[+-]?[\d.]+(e[+-]?\d+)?$/i.test(text) ? `'${text}` : text);

function toCsv(lines) {
  const quoted = (value) => {
    const text = harmless(String(value ?? ""));
    return /[",;\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return lines.map((line) => line.map(quoted).join(",")).join("\r\n");
}

// The rows behind a chart, names first; a row that holds lists gives a line for each of their items.
function rowsOf(spec) {
  const lists = Object.entries(spec.usermeta.labkit.lists);
  const rows = spec.datasets[spec.data.name].flatMap((row) => {
    const plain = Object.fromEntries(Object.entries(row).filter(([name]) => !lists.some(([list]) => list === name)));
    if (!lists.length) return [plain];
    return lists.flatMap(([list, names]) =>
      (row[list] ?? []).map((item) => ({ ...plain, ...Object.fromEntries(names.map((name, i) => [name, item[i]])) })),
    );
  });
  const names = [...new Set(rows.flatMap(Object.keys))];
  return [names, ...rows.map((row) => names.map((name) => row[name]))];
}

function saveText(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  save(name, url);
  URL.revokeObjectURL(url);
}

async function handOut(figure, kind) {
  const name = `${figure.id}.${kind}`;
  if (kind === "csv") saveText(name, toCsv(rowsOf(figure.spec)));
  else save(name, await figure.view.toImageURL(kind, kind === "png" ? 2 : 1));
}

// Rows of cells as lines of one cell a column, cells that span several repeated.
function spread(rows) {
  const lines = rows.map(() => []);
  rows.forEach((row, y) => {
    let x = 0;
    for (const cell of row.cells) {
      while (lines[y][x]) x += 1;
      for (let down = 0; down < Math.min(cell.rowSpan, rows.length - y); down++) {
        for (let across = 0; across < cell.colSpan; across++) lines[y + down][x + across] = cell;
      }
    }
  });
  return lines;
}

// A table as lines of text: heads that span columns lead those below them, numbers are bare, a dash is nothing.
function grid(table) {
  const bare = (cell) => {
    const line = cell.textContent.replace(/\s+/g, " ").trim().replace(/^\u2212/, "-");
    if (line === "–") return "";
    return /^[+-]?\d{1,3}(,\d{3})*(\.\d+)?$/.test(line) || /^\+[\d.]+$/.test(line) ? line.replace(/^\+|,/g, "") : line;
  };
  const heads = spread([...(table.tHead?.rows ?? [])]);
  const titles = (heads.at(-1) ?? []).map((_, x) => [...new Set(heads.map((line) => bare(line[x])))].filter(Boolean).join(": "));
  const bodies = [...table.tBodies].flatMap((body) =>
    spread([...body.rows]).map((line) => (new Set(line).size === 1 ? [bare(line[0])] : line.map(bare))),
  );
  return [...(titles.length ? [titles] : []), ...bodies];
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // No clipboard for pages opened as files: a hidden field's selection can still be copied.
    const field = document.createElement("textarea");
    field.value = text;
    field.setAttribute("aria-hidden", "true");
    field.style.cssText = "position: fixed; top: 0; opacity: 0";
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

function button(label, title, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = label;
  made.title = title;
  made.addEventListener("click", () => act(made));
  return made;
}

// Rows in the order of one column, then the other way round, then as they were.
function sortable(table) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = spread([...(table.tHead?.rows ?? [])]).at(-1) ?? [];
  if (table.tBodies.length > 1 || rows.length < 3 || rows.some((row) => row.cells.length !== heads.length)) return;
  const orders = ["ascending", "descending", "none"];
  heads.forEach((head, column) => {
    const sorter = button("", "Sort by this column", () => {
      const order = orders[(orders.indexOf(head.ariaSort ?? "none") + 1) % 3];
      for (const other of heads) other.removeAttribute("aria-sort");
      head.ariaSort = order;
      const value = (row) => row.cells[column].textContent.trim().replaceAll(",", "");
      const compare = (one, other) => {
        const [left, right] = [value(one), value(other)];
        if ((left === "–") !== (right === "–")) return left === "–" ? 1 : -1;
        const flip = order === "descending" ? -1 : 1;
        return flip * (left - right || left.localeCompare(right, undefined, { numeric: true }));
      };
      body.append(...(order === "none" ? rows : rows.toSorted(compare)));
    });
    sorter.className = "lk-sort";
    sorter.append(...head.childNodes);
    head.append(sorter);
  });
}

function equip(box) {
  const tables = [...box.querySelectorAll("table")];
  const name = (box.querySelector("[id^=labkit-]")?.id ?? "labkit-table").replace("labkit-", "");
  const tools = document.createElement("div");
  tools.className = "lk-tools";
  const hint = document.createElement("span");
  hint.className = "lk-hint";
  hint.textContent = "Wider than the window: scroll sideways.";
  const said = document.createElement("span");
  said.setAttribute("role", "status");
  const tell = async (made, text) => {
    const done = await copy(text);
    said.textContent = done ? "Copied." : "This browser lets nothing be copied; take the CSV.";
    setTimeout(() => (said.textContent = ""), 4000);
  };
  const all = () => tables.flatMap((table, place) => [...(place ? [[]] : []), ...grid(table)]);
  const lines = () => all().map((line) => line.map(harmless));
  tools.append(
    hint,
    said,
    button("Copy", "Copy this table for a spreadsheet", (made) => tell(made, lines().map((line) => line.join("\t")).join("\n"))),
    button("CSV", "Save this table as CSV", () => saveText(`${name}.csv`, toCsv(all()))),
  );
  box.after(tools);
  const measure = () => {
    const rest = box.scrollWidth - box.clientWidth;
    hint.hidden = rest < 4;
    box.toggleAttribute("data-more", rest - box.scrollLeft > 4);
  };
  box.addEventListener("scroll", measure, { passive: true });
  new ResizeObserver(measure).observe(box);
  for (const table of tables) if (table.classList.contains("gt_table")) sortable(table);
}

// The figures behind a chart as a table, made when it is opened: for readers who do not see the drawing.
const LONGEST = 300;
function tabulate(details, spec) {
  const [names, ...rows] = rowsOf(spec);
  const table = document.createElement("table");
  const line = (parent, values, kind) => {
    const row = parent.insertRow();
    for (const value of values) {
      const cell = document.createElement(kind);
      if (kind === "th") cell.scope = "col";
      cell.textContent = String(value ?? "–");
      row.append(cell);
    }
  };
  line(table.createTHead(), names, "th");
  const body = table.createTBody();
  for (const row of rows.slice(0, LONGEST)) line(body, row, "td");
  const box = document.createElement("div");
  box.className = "lk-output";
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Table: the data of this chart");
  box.append(table);
  details.append(box);
  if (rows.length > LONGEST) {
    const note = document.createElement("p");
    note.textContent = `The first ${LONGEST} of ${rows.length} rows; CSV has them all.`;
    details.append(note);
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
  for (const each of figure.querySelectorAll("button[data-kind]")) {
    each.addEventListener("click", () => handOut(figure, each.dataset.kind));
  }
  const details = figure.querySelector("details");
  details.addEventListener("toggle", () => details.open && details.children.length === 1 && tabulate(details, figure.spec));
}
for (const box of document.querySelectorAll("main > .lk-output:has(table)")) equip(box);
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

// Paper is light: what a dark chart has drawn in its own colours is repainted for the print, at once, and back after it.
function pairs(one, other) {
  if (typeof one === "object" && one) return Object.keys(one).flatMap((key) => pairs(one[key], other[key]));
  return one !== other ? [[one, other]] : [];
}
function repaint(colours) {
  for (const each of document.querySelectorAll(".lk-chart svg [fill], .lk-chart svg [stroke]")) {
    for (const name of ["fill", "stroke"]) {
      const to = colours.get(each.getAttribute(name));
      if (to) each.setAttribute(name, to);
    }
  }
}
const toLight = pairs(themes.dark, themes.light);
window.matchMedia("print").addEventListener("change", (print) => {
  if (document.documentElement.dataset.mode !== "dark") return;
  repaint(new Map(print.matches ? toLight : toLight.map(([from, to]) => [to, from])));
});
