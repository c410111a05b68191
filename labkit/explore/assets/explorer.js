// The explorer's front end. Plain DOM: whatever comes from the kernel is text, never markup.
const GIB = 2 ** 30;
const QUIET_MS = 60; // a change waits for the next one so long
const SILENT_MS = 5000; // after which a kernel that says nothing is mentioned
const SVG = "http://www.w3.org/2000/svg";
const VERDICTS = {
  fits: ["✓", "fits"],
  tight: ["!", "fits without the margin"],
  no: ["✕", "does not fit"],
};
const GROUPS = { given: "Given", workloads: "Workloads", models: "Models" };
const MODE = "recompute.mode";
const LABELS = "recompute.recompute_modules";
const LAYERS = "recompute.recompute_num_layers";

const gib = (bytes, digits = 2) => (bytes / GIB).toFixed(digits);
const percent = (part, whole) => `${((100 * part) / whole).toFixed(1)}%`;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Light or dark as the page around is: JupyterLab and VS Code say it, elsewhere the system does.
function isDark() {
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  if (jpThemeLight !== undefined) return jpThemeLight === "false";
  if (vscodeThemeKind !== undefined) return vscodeThemeKind.includes("dark");
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

// ---- controls ----

class Controls {
  constructor(options, changed) {
    this.options = options;
    this.changed = changed;
    this.inputs = new Map(); // by path: { get, set, mark }
    const grouped = (group) => options.controls.filter((control) => control.group === group).map((c) => this.field(c));
    this.start = element("select", { "aria-label": "Model or workload", onchange: () => changed(true) });
    for (const { group, starts } of options.starts) {
      const listed = element("optgroup", { label: GROUPS[group] });
      for (const { key, name } of starts) listed.append(element("option", { value: key }, name));
      this.start.append(listed);
    }
    this.fp8 = this.check("fp8", "FP8, as launched", "launch.arguments --fp8-format");
    const training = element("div", { class: "lk-grid", role: "group", "aria-label": "Training" }, ...grouped("training"), this.fp8);
    this.training = element("details", { open: true }, element("summary", {}, "Training"), training);
    this.element = element(
      "form",
      { class: "lk-controls", "aria-label": "What is run", onsubmit: (event) => event.preventDefault() },
      element("fieldset", {}, element("legend", {}, "Model or workload"), this.start),
      this.group("Layout", grouped("layout")),
      this.group("Batch", grouped("batch")),
      this.recompute(),
      this.training,
      element("button", { type: "button", onclick: () => changed(true) }, "Back to the start"),
    );
  }

  group(title, fields) {
    return element("fieldset", {}, element("legend", {}, title), element("div", { class: "lk-grid" }, ...fields));
  }

  field(control) {
    if (control.kind === "flag") return this.check(control.path, control.label, control.path);
    return control.kind === "one of" ? this.oneOf(control) : this.number(control);
  }

  labelled(label, path, input, wide) {
    input.setAttribute("title", path);
    return element("label", { class: wide ? "lk-field lk-span" : "lk-field" }, element("span", { title: path }, label), input);
  }

  check(path, label, title) {
    const input = element("input", { type: "checkbox", onchange: () => this.changed() });
    this.inputs.set(path, { get: () => input.checked, set: (value) => (input.checked = Boolean(value)), input });
    return element("label", { class: "lk-check lk-span", title }, input, element("span", {}, label));
  }

  oneOf({ path, label, options, optional }) {
    const input = element("select", { onchange: () => this.changed() });
    if (optional) input.append(element("option", { value: "" }, "not stated"));
    for (const option of options) input.append(element("option", { value: option }, option));
    const set = (value) => {
      const text = value ?? "";
      if (![...input.options].some((option) => option.value === text)) input.append(element("option", { value: text }, text));
      input.value = text;
    };
    this.inputs.set(path, { get: () => input.value || null, set, input });
    return this.labelled(label, path, input, label.length > 15);
  }

  number({ path, label, optional, doubles }) {
    const input = element("input", { type: "number", min: 1, step: "any", placeholder: optional ? "–" : null });
    const get = () => (input.value === "" ? (optional ? null : undefined) : Number(input.value));
    const step = (up) => {
      const now = get() ?? (up ? (doubles ? 0.5 : 1) : 1);
      const next = doubles ? (up ? now * 2 : Math.ceil(now / 2)) : now + (up ? 1 : -1);
      input.value = next < 1 || (optional && !up && now <= (doubles ? 1 : 2)) ? (optional ? "" : 1) : next;
      this.changed();
    };
    input.addEventListener("input", () => this.changed());
    input.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
      event.preventDefault();
      step(event.key === "ArrowUp");
    });
    const button = (sign, words, up) =>
      element("button", { type: "button", tabindex: -1, "aria-label": `${label}: ${words}`, onclick: () => step(up) }, sign);
    this.inputs.set(path, { get, set: (value) => (input.value = value ?? ""), input });
    input.setAttribute("aria-label", `${label} (${path})`);
    input.setAttribute("title", path);
    return element(
      "div",
      { class: "lk-field" },
      element("span", { title: path }, label),
      element(
        "div",
        { class: "lk-stepper" },
        button("−", doubles ? "half" : "one less", false),
        input,
        button("+", doubles ? "double" : "one more", true),
      ),
    );
  }

  recompute() {
    const mode = element("select", { "aria-label": "recompute", onchange: () => (show(), this.changed()) });
    for (const each of this.options.modes) mode.append(element("option", { value: each }, each));
    const boxes = this.options.labels.map((label) => [
      label,
      element("input", { type: "checkbox", onchange: () => this.changed() }),
    ]);
    const labels = element(
      "div",
      { class: "lk-labels lk-span", role: "group", "aria-label": "recompute_modules" },
      ...boxes.map(([label, box]) => element("label", { class: "lk-check" }, box, element("span", {}, label))),
    );
    const layers = this.number({ path: LAYERS, label: "recompute_num_layers" });
    layers.classList.add("lk-span");
    const show = () => {
      labels.hidden = mode.value !== "selective";
      layers.hidden = !mode.value.startsWith("full");
    };
    const getLabels = () => boxes.filter(([, box]) => box.checked).map(([label]) => label);
    this.inputs.set(MODE, { get: () => mode.value, set: (value) => ((mode.value = value), show()), input: mode });
    this.inputs.set(LABELS, {
      get: getLabels,
      set: (value) => boxes.forEach(([label, box]) => (box.checked = value.includes(label))),
      input: labels,
    });
    mode.setAttribute("title", "recompute.recompute_granularity, recompute.recompute_method");
    return this.group("Recompute", [element("div", { class: "lk-span" }, mode), labels, layers]);
  }

  get values() {
    const found = {};
    for (const [path, { get }] of this.inputs) {
      const value = get();
      if (value !== undefined) found[path] = value;
    }
    return found;
  }

  show(start, values) {
    this.start.value = start;
    for (const [path, value] of Object.entries(values)) this.inputs.get(path)?.set(value);
    this.fp8.hidden = !values.fp8;
  }

  // Marks what a finding names.
  mark(findings) {
    const wrong = new Set(findings.filter((each) => each.severity === "error").map((each) => each.field));
    for (const [path, { input }] of this.inputs) {
      const named = wrong.has(path) || (path === MODE && [...wrong].some((field) => field.startsWith("recompute.")));
      if (named) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
  }
}

// ---- the picture ----

function swatch(theme, category) {
  const { number, colour, ink } = theme.categories[category];
  return element("span", { class: "lk-swatch", style: { background: colour, color: ink } }, String(number));
}

function stack(theme, held, margin, scale) {
  const bar = element("div", { class: "lk-stack", style: { width: "100%" } });
  for (const [category, bytes] of held) {
    const { number, colour, ink } = theme.categories[category];
    const share = (100 * bytes) / scale;
    const style = { width: `${share}%`, background: colour, color: ink };
    bar.append(element("div", { class: "lk-segment", style, title: `${category}: ${gib(bytes, 3)} GiB` }, share > 2 ? String(number) : ""));
  }
  if (margin) {
    const style = { width: `${(100 * margin) / scale}%` };
    bar.append(element("div", { class: "lk-segment lk-margin", style, title: `margin: ${gib(margin, 3)} GiB` }));
  }
  return bar;
}

function bars(theme, picture, traced) {
  const own = picture.fits[0].memory;
  const top = Math.max(picture.peak + picture.margin, traced?.peak ?? 0);
  const scale = Math.max(top * 1.04, top > own / 8 ? own * 1.02 : 0);
  const marks = picture.fits.filter(({ memory }) => memory <= scale);
  const track = (held, margin) =>
    element(
      "div",
      { class: "lk-track" },
      stack(theme, held, margin, scale),
      ...marks.map(({ memory }) => element("div", { class: "lk-mark", style: { left: percent(memory, scale) } })),
    );
  const words = picture.held.map(([category, bytes]) => `${category} ${gib(bytes)} GiB`).join(", ");
  const made = element("div", { class: "lk-bars", role: "img", "aria-label": `What holds the peak: ${words}` });
  made.append(element("span", {}, "estimated"), track(picture.held, picture.margin));
  if (traced) made.append(element("span", {}, "traced"), track(traced.held, 0));
  const labels = marks.map(({ memory, gpu }) => {
    const place = memory / scale;
    return element("span", { style: { left: percent(memory, scale) }, "data-last": place > 0.9 }, `${capacity(gpu)} GPU: ${gib(memory)} GiB`);
  });
  made.append(element("span"), element("div", { class: "lk-marks" }, ...labels));
  return made;
}

function table(theme, picture, traced) {
  const theirs = new Map(traced?.held);
  const heads = ["held by", "GiB", "share", ...(traced ? ["traced"] : [])];
  const rows = picture.held.map(([category, bytes]) => [category, bytes, theirs.get(category) ?? 0]);
  for (const [category, bytes] of theirs) if (!rows.some(([name]) => name === category)) rows.push([category, 0, bytes]);
  return element(
    "table",
    {},
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
    element(
      "tbody",
      {},
      ...rows.map(([category, bytes, seen]) =>
        element(
          "tr",
          {},
          element("th", { scope: "row" }, swatch(theme, category), category),
          element("td", {}, gib(bytes, 3)),
          element("td", {}, percent(bytes, picture.peak)),
          traced ? element("td", {}, gib(seen, 3)) : null,
        ),
      ),
    ),
  );
}

const capacity = (gpu) => /(\d+)gb$/.exec(gpu)?.[1].concat(" GB") ?? gpu;

const TALL = 250;
const EDGES = { top: 22, right: 10, bottom: 26, left: 44 };

function timeline(theme, picture, width) {
  const { at, mib, categories, phases, iteration } = picture.timeline;
  const wide = Math.max(width - EDGES.left - EDGES.right, 120);
  const high = TALL - EDGES.top - EDGES.bottom;
  const totals = at.map((_, moment) => mib.reduce((sum, each) => sum + each[moment], 0));
  const most = Math.max(...totals, 1);
  const own = picture.fits[0].memory / 2 ** 20;
  const top = Math.max(most * 1.06, own < most * 1.5 ? own * 1.04 : 0);
  const x = (position) => EDGES.left + (wide * position) / 1e4;
  const y = (value) => EDGES.top + high * (1 - value / top);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${TALL}`, width, height: TALL });

  for (const value of ticks(top / 1024)) {
    const level = y(value * 1024);
    svg.append(
      drawn("line", { x1: EDGES.left, x2: EDGES.left + wide, y1: level, y2: level, stroke: "var(--lk-line)" }),
      text(String(value), { x: EDGES.left - 6, y: level + 3.5, "text-anchor": "end" }),
    );
  }
  const below = at.map(() => 0);
  const numbers = [];
  mib.forEach((values, place) => {
    const { number, colour, ink } = theme.categories[categories[place]];
    let upper = "";
    let lower = "";
    let best = 0;
    values.forEach((value, moment) => {
      const until = x(at[moment + 1] ?? 1e4).toFixed(1);
      const from = x(at[moment]).toFixed(1);
      const low = y(below[moment]).toFixed(1);
      const up = y(below[moment] + value).toFixed(1);
      upper += `L${from} ${up}L${until} ${up}`;
      lower = `L${until} ${low}L${from} ${low}${lower}`;
      const inside = at[moment] > 300 && at[moment] < 9500;
      if (inside && value > values[best]) best = moment;
    });
    if (values.some(Boolean)) {
      const outline = { fill: colour, stroke: "var(--lk-surface)", "stroke-width": 0.5 };
      svg.append(drawn("path", { d: `M${upper.slice(1)}${lower}Z`, ...outline }));
      if ((values[best] / top) * high > 13) numbers.push([x(at[best]) + 8, y(below[best] + values[best] / 2) + 3.5, number, ink]);
    }
    values.forEach((value, moment) => (below[moment] += value));
  });
  for (const [left, level, number, ink] of numbers) svg.append(text(String(number), { x: left, y: level }, ink));
  for (const { memory, gpu } of picture.fits) {
    const level = y(memory / 2 ** 20);
    if (level < EDGES.top) continue;
    svg.append(
      drawn("line", { x1: EDGES.left, x2: EDGES.left + wide, y1: level, y2: level, stroke: "var(--lk-ink)", "stroke-dasharray": "5 3" }),
      text(`${capacity(gpu)} GPU`, { x: EDGES.left + 5, y: level + 13 }),
    );
  }
  let free = 0;
  for (const [phase, start, end] of phases) {
    const left = x(start);
    svg.append(drawn("line", { x1: left, x2: left, y1: EDGES.top, y2: EDGES.top + high, stroke: "var(--lk-muted)", "stroke-dasharray": "1 3" }));
    const room = x(end) - left;
    if (room > 6.2 * phase.length && left >= free) {
      svg.append(text(phase, { x: left + 3, y: EDGES.top - 7 }));
      free = left + 6.2 * phase.length;
    } else if (end === 1e4 && left - 6.2 * phase.length >= free) {
      svg.append(text(phase, { x: x(end), y: EDGES.top - 7, "text-anchor": "end" }));
    }
  }
  svg.append(
    drawn("line", { x1: EDGES.left, x2: EDGES.left + wide, y1: EDGES.top + high, y2: EDGES.top + high, stroke: "var(--lk-muted)" }),
    text(`through step ${iteration}, layer by layer (no scale of time)`, { x: EDGES.left + wide / 2, y: TALL - 8, "text-anchor": "middle" }),
  );
  const pointer = drawn("line", { y1: EDGES.top, y2: EDGES.top + high, stroke: "var(--lk-ink)", visibility: "hidden" });
  svg.append(pointer);
  const moments = at.map((position, moment) => ({
    left: x(position),
    phase: phases.findLast(([, start]) => start <= position)?.[0] ?? phases[0][0],
    total: totals[moment],
    parts: categories.map((category, place) => [category, mib[place][moment]]).filter(([, value]) => value).reverse(),
  }));
  return { svg, pointer, moments };
}

function text(words, attributes, fill) {
  const made = drawn("text", attributes, words);
  if (fill) made.style.fill = fill;
  return made;
}

// About five round numbers below a limit.
function ticks(limit) {
  const rough = limit / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
  return Array.from({ length: Math.floor(limit / step) + 1 }, (_, number) => Number((number * step).toPrecision(6)));
}

class Timeline {
  constructor() {
    this.holder = element("div", { tabindex: 0, role: "group", "aria-label": "Memory through the step; arrow keys go from moment to moment" });
    this.tip = element("div", { class: "lk-tip", hidden: true });
    this.words = element("div", { class: "lk-unseen", "aria-live": "polite" });
    this.element = element("figure", {}, element("h4", {}, "Through the step (GiB, estimated)"), this.holder, this.tip, this.words);
    this.holder.addEventListener("pointermove", (event) => this.point(event));
    this.holder.addEventListener("pointerleave", () => this.hide());
    this.holder.addEventListener("blur", () => this.hide());
    this.holder.addEventListener("keydown", (event) => this.step(event));
  }

  show(theme, picture) {
    const width = this.holder.clientWidth;
    if (!width) return;
    this.theme = theme;
    this.drawn = timeline(theme, picture, width);
    this.holder.replaceChildren(this.drawn.svg);
    this.hide();
  }

  point(event) {
    const { left, width } = this.drawn.svg.getBoundingClientRect();
    const at = ((event.clientX - left) * this.drawn.svg.viewBox.baseVal.width) / width;
    this.tell(Math.max(this.drawn.moments.findLastIndex((moment) => moment.left <= at), 0));
  }

  step(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = (this.at ?? -by) + by;
    this.tell(Math.min(Math.max(next, 0), this.drawn.moments.length - 1));
    const { phase, total } = this.drawn.moments[this.at];
    this.words.textContent = `${phase}: ${(total / 1024).toFixed(2)} GiB`;
  }

  tell(number) {
    this.at = number;
    const { left, phase, total, parts } = this.drawn.moments[number];
    for (const end of ["x1", "x2"]) this.drawn.pointer.setAttribute(end, left);
    this.drawn.pointer.setAttribute("visibility", "visible");
    const line = (name, value, mark) => element("p", {}, element("span", {}, mark ?? "", name), element("span", {}, (value / 1024).toFixed(2)));
    this.tip.replaceChildren(
      line(`${phase}, total`, total),
      ...parts.map(([category, value]) => line(category, value, swatch(this.theme, category))),
    );
    this.tip.hidden = false;
    const width = this.holder.clientWidth;
    const right = left > width / 2;
    Object.assign(this.tip.style, { top: "46px", left: right ? "" : `${left + 12}px`, right: right ? `${width - left + 12}px` : "" });
  }

  hide() {
    this.at = undefined;
    this.tip.hidden = true;
    this.drawn?.pointer.setAttribute("visibility", "hidden");
  }
}

class Picture {
  constructor(theme) {
    this.theme = theme;
    this.title = element("p", { class: "lk-title" });
    this.peak = element("div", { class: "lk-peak" });
    this.where = element("p", { class: "lk-where" });
    this.fits = element("ul", { class: "lk-fits", "aria-label": "Does it fit" });
    this.bars = element("figure");
    this.table = element("div", { class: "lk-table" });
    this.timeline = new Timeline();
    this.stages = element("figure");
    this.element = element(
      "div",
      { class: "lk-shown" },
      this.title,
      element("div", { class: "lk-headline" }, this.peak, this.fits),
      this.where,
      element("div", { class: "lk-charts" }, this.bars, this.timeline.element, this.table, this.stages),
    );
  }

  show(picture, tracing) {
    const traced = tracing.state === "done" && tracing.hash === picture.hash ? tracing : undefined;
    const digits = picture.settled ? 3 : 2;
    this.title.replaceChildren(
      element("strong", { dir: "auto" }, shortened(picture.name)),
      `. ${picture.layout}. ${picture.batch}, in ${picture.microbatches} micro-batch${picture.microbatches === 1 ? "" : "es"} on each rank. Recompute: ${picture.recompute}.`,
    );
    this.peak.dataset.bytes = picture.peak;
    this.peak.dataset.settled = picture.settled;
    this.peak.replaceChildren(`${picture.settled ? "" : "≈ "}${gib(picture.peak, digits)}`, element("small", {}, "GiB"));
    const stage = picture.stages.length ? `, on pipeline stage ${picture.stage} (of 0 to ${picture.stages.length - 1}), which holds most` : "";
    const aside = ` Fit is asked with the margin of ${gib(picture.margin)} GiB that is set aside above it.`;
    const again = picture.replay_ms ? ` Recompute runs ${picture.replay_ms < 1 ? picture.replay_ms : picture.replay_ms.toFixed(1)} ms or more again each step.` : "";
    this.where.textContent = `peak allocated (estimated), in ${picture.phase} of step ${picture.iteration}${stage}.${again}${aside}`;
    this.fits.replaceChildren(...picture.fits.map(fit));
    this.bars.replaceChildren(element("h4", {}, "What holds the peak (margin hatched)"), bars(this.theme, picture, traced));
    this.table.replaceChildren(table(this.theme, picture, traced));
    this.timeline.show(this.theme, picture);
    this.showStages(picture);
  }

  showStages({ stages, stage }) {
    this.stages.hidden = !stages.length;
    const most = Math.max(...stages.map(([, , bytes]) => bytes ?? 0), 1);
    const rows = stages.flatMap(([number, layers, bytes]) => [
      element("b", {}, `stage ${number} (${layers} layer${layers === 1 ? "" : "s"})`),
      element("i", { style: { width: percent(bytes ?? 0, most) }, "data-fullest": number === stage }),
      element("span", {}, bytes === null ? "…" : gib(bytes)),
    ]);
    const shown = element("div", { class: "lk-stages", tabindex: stages.length > 12 ? 0 : null }, ...rows);
    this.stages.replaceChildren(element("h4", {}, "Peak of each pipeline stage (GiB of tensors, estimated)"), shown);
  }
}

function fit({ gpu, name, verdict, room }) {
  const [sign, words] = VERDICTS[verdict];
  const left = room >= 0 ? `${gib(room)} GiB to spare` : `${gib(-room)} GiB short`;
  return element("li", { class: "lk-fit", "data-verdict": verdict, "data-gpu": gpu, title: name },
    element("strong", {}, `${sign} ${capacity(gpu)}: ${words}`),
    element("span", {}, left));
}

const shortened = (name) => (name.length > 80 ? `${name.slice(0, 79)}…` : name);

function finding({ severity, field, reason, remedy, authority }) {
  return element("li", { class: "lk-finding", "data-severity": severity },
    element("p", {}, element("strong", {}, `${severity} `), element("code", {}, field), `: ${reason}`),
    element("p", {}, `Remedy: ${remedy}`),
    element("small", {}, `${severity === "error" ? "refused by" : "according to"}: ${authority}`));
}

// ---- actions: text to take along, a trace ----

class Actions {
  constructor(model) {
    this.model = model;
    const button = (words, act, first) => element("button", { type: "button", class: first ? "lk-first" : null, onclick: act }, words);
    this.trace = button("Confirm with a trace", () => model.send({ do: "trace" }), true);
    this.cancel = button("Cancel", () => model.send({ do: "cancel" }));
    this.progress = element("progress", { "aria-label": "Trace", max: 1 });
    this.said = element("p", { class: "lk-said", role: "status" });
    this.traced = element("p", { class: "lk-traced", role: "status" });
    this.text = element("textarea", { readonly: true, hidden: true, "aria-label": "The workload as text", spellcheck: "false" });
    this.asking = new Map();
    this.buttons = [
      button("Copy as YAML", () => this.ask("yaml", (text) => this.copy(text))),
      button("Copy as Python", () => this.ask("python", (text) => this.copy(text))),
      button("Download YAML", () => this.ask("yaml", (text, name) => this.download(text, `${name}.yaml`))),
    ];
    this.element = element(
      "div",
      {},
      element("div", { class: "lk-actions" }, this.trace, this.progress, this.cancel, ...this.buttons),
      this.traced,
      this.said,
      this.text,
    );
  }

  ask(kind, then) {
    const id = Math.random();
    this.asking.set(id, then);
    this.model.send({ do: kind, id });
  }

  answered(message) {
    if (message.said) this.say(message.said);
    const then = this.asking.get(message.id);
    this.asking.delete(message.id);
    then?.(message.text, message.name);
  }

  say(words) {
    this.said.textContent = words;
  }

  async copy(text) {
    this.text.hidden = false;
    this.text.value = text;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Where the page has no clipboard of its own.
      this.text.select();
      document.execCommand("copy");
    }
    this.say("Copied.");
  }

  download(text, name) {
    const url = URL.createObjectURL(new Blob([text], { type: "text/yaml" }));
    element("a", { href: url, download: name }).click();
    URL.revokeObjectURL(url);
    this.say(`Saved as ${name}.`);
  }

  allow(canRun) {
    for (const button of [...this.buttons, this.trace]) button.disabled = !canRun;
  }

  show(tracing, picture) {
    const busy = tracing.state === "tracing";
    this.trace.hidden = busy;
    this.progress.hidden = this.cancel.hidden = !busy;
    if (busy) {
      this.progress.max = tracing.expected;
      this.progress.value = tracing.begun;
    }
    const other = tracing.hash && tracing.hash !== picture.hash ? `Of another choice (${shortened(tracing.name)}): ` : "";
    this.traced.dataset.state = tracing.state ?? "";
    this.traced.textContent = other + told(tracing);
  }
}

function told(tracing) {
  if (tracing.state === "tracing") return `Tracing: ${tracing.phase}. Megatron Core's own code runs over tensors without data.`;
  if (tracing.state === "failed") return tracing.sentence;
  if (tracing.state === "cancelled") return "The trace was cancelled.";
  if (tracing.state !== "done") return "";
  const { peak, estimated, difference, phase, iteration, rank, seconds } = tracing;
  const away = Math.abs(100 * difference);
  const compared =
    estimated === peak ? "equal to it" : `${away < 0.005 ? "less than 0.01" : away.toFixed(2)} % ${difference > 0 ? "above" : "below"} it`;
  return (
    `Traced peak ${gib(peak, 3)} GiB in ${phase} of step ${iteration} on rank ${rank} (${Math.round(seconds)} s); ` +
    `the estimate, ${gib(estimated, 3)} GiB, is ${compared}.`
  );
}

// ---- all of it ----

function render({ model, el }) {
  const options = model.get("options");
  const root = element("div", { class: "lk-explorer" });
  const picture = new Picture(options.theme);
  const findings = element("ul", { class: "lk-findings", role: "status", "aria-label": "Findings" });
  const actions = new Actions(model);
  let sent = 0;
  let timer;
  let silence;
  let restart = false;

  const controls = new Controls(options, (fromStart) => {
    restart ||= Boolean(fromStart);
    clearTimeout(timer);
    timer = setTimeout(send, QUIET_MS);
  });

  function send() {
    sent = Math.max(sent, model.get("answer").seq) + 1;
    model.set("choice", { seq: sent, start: controls.start.value, fields: restart ? {} : controls.values });
    model.save_changes();
    clearTimeout(silence);
    silence = setTimeout(() => actions.say("The kernel has not answered yet: it is busy, or there is none."), SILENT_MS);
  }

  function showAnswer() {
    const answer = model.get("answer");
    if (answer.seq < sent) return; // of a choice that is gone
    clearTimeout(silence);
    if (restart || answer.seq > sent || !sent) controls.show(answer.start, answer.values);
    restart = false;
    sent = answer.seq;
    root.toggleAttribute("data-refused", !answer.can_run);
    root.dataset.seq = answer.seq;
    controls.mark(answer.findings);
    const listed = answer.problem ? [{ severity: "error", field: "explorer", reason: answer.problem, remedy: "pick another", authority: "labkit" }] : answer.findings;
    findings.replaceChildren(...listed.map(finding));
    if (!answer.can_run) findings.append(element("li", { class: "lk-where" }, "Below, greyed: the last choice that can run."));
    actions.allow(answer.can_run);
    actions.say(answer.can_run ? `Estimated in ${answer.milliseconds} ms.` : "");
  }

  function showPicture() {
    const shown = model.get("picture");
    picture.show(shown, model.get("tracing"));
    actions.show(model.get("tracing"), shown);
    const idle = (shown.warnings ?? []).filter((words) => !model.get("answer").findings.some(({ field, reason, remedy }) => words === `${field}: ${reason}; ${remedy}`));
    for (const old of findings.querySelectorAll("[data-late]")) old.remove();
    for (const words of idle) {
      const item = element("li", { class: "lk-finding", "data-severity": "warning", "data-late": true }, words);
      if (!root.hasAttribute("data-refused")) findings.append(item);
    }
  }

  function paint() {
    const mode = isDark() ? "dark" : "light";
    const { palettes, verdicts, fonts } = options.theme;
    for (const [name, colour] of Object.entries(palettes[mode])) root.style.setProperty(`--lk-${name}`, colour);
    for (const [name, colour] of Object.entries(verdicts)) root.style.setProperty(`--lk-${name}`, colour);
    for (const [name, font] of Object.entries(fonts)) root.style.setProperty(`--lk-${name}`, font);
    root.style.colorScheme = mode;
    root.dataset.mode = mode;
  }

  root.append(
    element("div", { class: "lk-body" }, controls.element, element("section", { class: "lk-picture", "aria-label": "What it holds" }, findings, picture.element, actions.element)),
  );
  el.append(root);
  paint();
  showAnswer();
  showPicture();

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const page = new MutationObserver(paint);
  page.observe(document.body, { attributes: true });
  let measured = false;
  const size = new ResizeObserver(() => {
    picture.timeline.show(options.theme, model.get("picture"));
    if (measured || !root.clientWidth) return;
    measured = true;
    controls.training.open = root.clientWidth > 700; // else the picture would be far below
  });
  size.observe(picture.timeline.holder);
  system.addEventListener("change", paint);
  const both = () => (showAnswer(), showPicture());
  model.on("change:answer", both);
  model.on("change:picture", showPicture);
  model.on("change:tracing", showPicture);
  const hear = (message) => actions.answered(message);
  model.on("msg:custom", hear);
  return () => {
    clearTimeout(timer);
    clearTimeout(silence);
    page.disconnect();
    size.disconnect();
    system.removeEventListener("change", paint);
    model.off("change:answer", both);
    model.off("change:picture", showPicture);
    model.off("change:tracing", showPicture);
    model.off("msg:custom", hear);
  };
}

export default { render };
