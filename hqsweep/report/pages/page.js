"use strict";
const SVG = "http://www.w3.org/2000/svg", root = document.documentElement;

// Colours: as the system, light, dark.
const themes = ["", "light", "dark"], names = { "": "as the system", light: "light", dark: "dark" };
const store = (value) => { try { return value === undefined ? localStorage.hqsweep_theme || "" : (localStorage.hqsweep_theme = value); } catch { return ""; } };
const theme = document.querySelector("button.theme");
function paint(name) {
  root.dataset.theme = name;
  theme.textContent = `colours: ${names[name] || names[""]}`;
}
paint(themes.includes(store()) ? store() : "");
theme.addEventListener("click", () => {
  const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
  paint(next);
  store(next);
});

// Figures: hover, arrow keys, zoom, hidden arms.
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { className: "tip", role: "status", hidden: true }));
const short = (value, digits = 6) => String(Number(value.toPrecision(digits)));
const spec = (value, how) => {
  const [, sign, comma, digits, kind] = /^([+]?)(,?)(?:\.(\d+))?([fg]?)/.exec(how || "");
  const number = Number(value);
  if (value === null || value === undefined || Number.isNaN(number)) return value ?? "-";
  const text = kind === "f" ? number.toFixed(digits) : short(number, Number(digits || 6));
  return (sign && number >= 0 ? "+" : "") + (comma ? Number(text).toLocaleString("en") : text);
};
const said = (hover, values) => hover.replace(/%\{(\w+)(?::([^}]+))?\}/g, (_, key, how) => spec(values[key], how)).replace(/<br>/g, "\n");
const at = (axis, value) => axis.from + ((axis.log ? Math.log10(value) : value) - axis.low) / (axis.high - axis.low) * (axis.to - axis.from);
const back = (axis, place) => axis.low + (place - axis.from) / (axis.to - axis.from) * (axis.high - axis.low);

function ticksOf(axis) {
  const rough = (axis.high - axis.low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((lead) => lead * power).find((each) => each >= rough * (1 - 1e-9)), ticks = [];
  for (let place = Math.ceil(axis.low / step); place * step <= axis.high; place++) {
    const value = Number((place * step).toPrecision(12));
    ticks.push([value, (axis.signed && value > 0 ? "+" : "") + short(value)]);
  }
  return ticks;
}

class Chart {
  constructor(box) {
    this.box = box;
    Object.assign(this, JSON.parse(box.querySelector("script").textContent));
    this.picture = box.querySelector(".picture");
    this.groups = [...box.querySelectorAll(".trace")];
    this.points = this.traces.filter((trace) => trace.x);
    this.first = [this.x.low, this.x.high, this.y.low, this.y.high];
    this.zooms = this.points.length > 0 && !this.x.names && !this.y.names && !this.x.log && !this.y.log;
    this.cursor = null;
    this.hidden = new Set();
    this.picture.setAttribute("tabindex", "0");
    this.picture.addEventListener("pointermove", (event) => this.dragged ? this.stretch(event) : this.hover(event));
    this.picture.addEventListener("pointerleave", () => { tip.hidden = true; });
    this.picture.addEventListener("blur", () => { tip.hidden = true; });
    this.picture.addEventListener("keydown", (event) => this.key(event));
    if (this.zooms) {
      this.picture.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") this.dragged = this.where(event); });
      addEventListener("pointerup", (event) => this.release(event));
      this.picture.addEventListener("dblclick", () => this.show(this.first));
    }
  }

  where(event) {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.picture.getScreenCTM().inverse());
    return [x, y];
  }

  screen(x, y) {
    return new DOMPoint(x, y).matrixTransform(this.picture.getScreenCTM());
  }

  visible() {
    const shown = [];
    this.points.forEach((trace) => {
      if (!trace.hover || this.hidden.has(trace.arm)) return;
      trace.x.forEach((value, place) => {
        if (value === null || trace.y[place] === null) return;
        const point = [at(this.x, value), at(this.y, trace.y[place])];
        if (point[0] >= this.x.from - 1 && point[0] <= this.x.to + 1 && point[1] <= this.y.from + 1 && point[1] >= this.y.to - 1) shown.push({ trace, place, point });
      });
    });
    return shown;
  }

  words({ trace, place }) {
    const named = (axis, value) => axis.names ? axis.names[value] : value;
    const values = { x: named(this.x, trace.x[place]), y: named(this.y, trace.y[place]), text: trace.text?.[place], customdata: trace.customdata?.[place] };
    return [trace.name || trace.arm, said(trace.hover, values)].filter(Boolean).join("\n");
  }

  tell(text, x, y) {
    const corner = this.screen(x, y);
    tip.textContent = text;
    tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(corner.x + 12, innerWidth - tip.offsetWidth - 8)) + scrollX}px`;
    tip.style.top = `${corner.y + 14 + scrollY}px`;
  }

  hover(event) {
    const [x, y] = this.where(event), cells = this.traces.find((trace) => trace.z);
    if (cells) return this.cell(cells, x, y);
    const near = this.visible().map((each) => [Math.hypot(each.point[0] - x, each.point[1] - y), each]).sort((a, b) => a[0] - b[0])[0];
    if (!near || near[0] > 30) { tip.hidden = true; return; }
    this.cursor = near[1];
    this.tell(this.words(near[1]), ...near[1].point);
  }

  cell(cells, x, y) {
    const column = Math.floor((x - this.x.from) / (this.x.to - this.x.from) * cells.columns.length);
    const top = Math.min(this.y.from, this.y.to), row = Math.floor((y - top) / Math.abs(this.y.to - this.y.from) * cells.rows.length);
    const value = cells.z[row]?.[column];
    if (value === undefined || value === null) { tip.hidden = true; return; }
    const word = cells.custom ? cells.words[cells.custom[row][column]] : "";
    this.cursor = { row, column };
    this.tell(said(cells.hover, { x: cells.columns[column], y: cells.rows[row], z: value, customdata: word }), x, y);
  }

  key(event) {
    const arrow = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (arrow) this.step(...arrow);
    else if (event.key === "Escape") { tip.hidden = true; this.zooms && this.show(this.first); }
    else if (this.zooms && "+-".includes(event.key)) this.magnify(event.key === "+" ? 0.5 : 2);
    else return;
    event.preventDefault();
  }

  step(across, down) {
    const cells = this.traces.find((trace) => trace.z);
    if (cells) {
      const { row, column } = this.cursor || { row: 0, column: across ? -1 : 0 }, size = [cells.rows.length, cells.columns.length];
      const next = [Math.min(size[0] - 1, Math.max(0, row + down)), Math.min(size[1] - 1, Math.max(0, column + across))];
      const middle = (axis, place, count) => Math.min(axis.from, axis.to) + (place + 0.5) / count * Math.abs(axis.to - axis.from);
      return this.cell(cells, middle(this.x, next[1], size[1]), middle(this.y, next[0], size[0]));
    }
    const shown = this.visible(), traces = [...new Set(shown.map((each) => each.trace))];
    if (!shown.length) return;
    const now = this.cursor?.trace && traces.includes(this.cursor.trace) ? this.cursor : null;
    const trace = now ? traces[(traces.indexOf(now.trace) + down + traces.length) % traces.length] : traces[0];
    const own = shown.filter((each) => each.trace === trace);
    const nearest = now ? own.reduce((best, each) => Math.abs(each.point[0] - now.point[0]) < Math.abs(best.point[0] - now.point[0]) ? each : best) : own[0];
    this.cursor = now ? own[Math.min(own.length - 1, Math.max(0, own.indexOf(nearest) + across))] : own[0];
    this.tell(this.words(this.cursor), ...this.cursor.point);
  }

  magnify(factor) {
    const [x, y] = this.cursor?.point || [(this.x.from + this.x.to) / 2, (this.y.from + this.y.to) / 2];
    const ends = (axis, middle) => [axis.from, axis.to].map((end) => back(axis, middle + factor * (end - middle)));
    this.show([...ends(this.x, x), ...ends(this.y, y)]);
  }

  stretch(event) {
    const [x, y] = this.where(event), [x0, y0] = this.dragged;
    this.frame ||= this.box.querySelector(".area").appendChild(document.createElementNS(SVG, "rect"));
    const sides = { class: "drag", x: Math.min(x, x0), y: Math.min(y, y0), width: Math.abs(x - x0), height: Math.abs(y - y0) };
    Object.entries(sides).forEach(([name, value]) => this.frame.setAttribute(name, value));
  }

  release(event) {
    if (!this.dragged) return;
    const [x0, y0] = this.dragged, [x, y] = this.where(event);
    this.dragged = null;
    this.frame?.remove();
    this.frame = null;
    if (Math.abs(x - x0) < 5 || Math.abs(y - y0) < 5) return;
    this.show([...[x0, x].sort((a, b) => a - b).map((each) => back(this.x, each)), ...[y0, y].sort((a, b) => b - a).map((each) => back(this.y, each))]);
  }

  whole() {
    const extent = (key) => {
      const values = this.points.flatMap((trace) => trace[key]).filter((value) => value !== null);
      const low = Math.min(...values), high = Math.max(...values), room = 0.03 * (high - low) || 1;
      return [low - room, high + room];
    };
    return [...extent("x"), ...extent("y")];
  }

  show([left, right, low, high]) {
    Object.assign(this.x, { low: left, high: right });
    Object.assign(this.y, { low, high });
    tip.hidden = true;
    this.groups.forEach((group, place) => this.draw(group, this.traces[place], this.traces[place - 1]));
    this.box.querySelectorAll(".shape").forEach((shape, place) => this.move(shape, this.shapes[place]));
    const moved = [left, right, low, high].some((value, place) => value !== this.first[place]);
    this.box.querySelectorAll(".said").forEach((text) => { text.style.display = moved ? "none" : ""; });
    this.label();
  }

  path(xs, ys) {
    let pen = "M", path = "";
    xs.forEach((value, place) => {
      if (value === null || ys[place] === null) { pen = "M"; return; }
      path += `${pen}${at(this.x, value).toFixed(1)} ${at(this.y, ys[place]).toFixed(1)}`;
      pen = "L";
    });
    return path;
  }

  draw(group, trace, before) {
    const parts = [...group.children];
    if (trace.fill) parts.shift().setAttribute("d", `${this.path([...before.x, ...[...trace.x].reverse()], [...before.y, ...[...trace.y].reverse()])}z`);
    if (trace.line) parts.shift().setAttribute("d", this.path(trace.x, trace.y));
    const points = trace.x.flatMap((value, place) => value === null || trace.y[place] === null ? [] : [[value, trace.y[place]]]);
    parts.forEach((mark, place) => {
      const scale = /scale\(([^)]*)\)/.exec(mark.getAttribute("transform"))[1], [x, y] = points[place];
      mark.setAttribute("transform", `translate(${at(this.x, x).toFixed(1)} ${at(this.y, y).toFixed(1)}) scale(${scale})`);
    });
  }

  move(shape, [x0, x1, y0, y1]) {
    const ends = (axis, a, b) => (a === null ? [axis.from, axis.to] : [at(axis, a), at(axis, b)]).sort((one, other) => one - other);
    const [left, right] = ends(this.x, x0, x1), [top, bottom] = ends(this.y, y0, y1);
    if (shape.tagName === "rect") Object.entries({ x: left, y: top, width: right - left, height: bottom - top }).forEach(([name, value]) => shape.setAttribute(name, value));
    else shape.setAttribute("d", `M${left} ${top}L${right} ${bottom}`);
  }

  label() {
    const ticks = this.box.querySelector(".ticks"), { x, y } = this;
    const add = (name, attributes, text = "") => {
      const element = ticks.appendChild(document.createElementNS(SVG, name));
      Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
      element.textContent = text;
    };
    ticks.replaceChildren();
    ticksOf(y).forEach(([value, text]) => {
      add("path", { d: `M${x.from} ${at(y, value)}H${x.to}`, stroke: "#e6e6e6" });
      add("text", { x: x.from - 5, y: at(y, value) + 4, "text-anchor": "end" }, text);
    });
    ticksOf(x).forEach(([value, text]) => {
      add("path", { d: `M${at(x, value)} ${y.from}V${y.to}`, stroke: "#e6e6e6" });
      add("text", { x: at(x, value), y: y.from + 14, "text-anchor": "middle" }, text);
    });
  }

  hide(arm, gone) {
    if (gone) this.hidden.add(arm); else this.hidden.delete(arm);
    this.groups.forEach((group, place) => { if (this.traces[place].arm === arm) group.style.display = gone ? "none" : ""; });
  }
}
const charts = new Map([...document.querySelectorAll(".chart")].map((box) => [box, new Chart(box)]));

document.querySelectorAll("[data-arm]").forEach((box) => box.addEventListener("change", () => {
  document.querySelectorAll("[data-arm]").forEach((other) => { if (other.dataset.arm === box.dataset.arm) other.checked = box.checked; });
  charts.forEach((chart) => chart.hide(box.dataset.arm, !box.checked));
}));
document.querySelectorAll("button.range").forEach((button) => {
  const chart = charts.get(button.closest("figure").querySelector(".chart"));
  if (!chart) { button.remove(); return; }
  button.addEventListener("click", () => {
    const whole = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", whole);
    chart.show(whole ? chart.whole() : chart.first);
  });
});

// Tables: sort by a column, filter rows.
const value = (cell) => {
  const text = cell.textContent.trim(), number = Number.parseFloat(text.replace(/[,+]/g, "").replace("\u2212", "-"));
  return Number.isNaN(number) || !/^[+\-\u2212]?[\d.]/.test(text) ? text : number;
};
const order = (a, b) => {
  if (a === "-" || b === "-") return (a === "-") - (b === "-");
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
};
document.querySelectorAll(".scroll table").forEach((table) => {
  const body = table.tBodies[0], rows = [...body.rows], place = table.closest(".scroll");
  if (rows.length < 2) return;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "sort", title: "sort by this column" });
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending", sign = up ? 1 : -1;
      [...table.tHead.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const keyed = rows.map((row) => [value(row.cells[column]), row]);
      keyed.sort(([a], [b]) => a === "-" || b === "-" ? order(a, b) : sign * order(a, b));
      body.append(...keyed.map(([, row]) => row));
    });
  });
  if (rows.length < 8) return;
  const label = Object.assign(document.createElement("label"), { className: "filter", textContent: "filter " });
  const field = label.appendChild(Object.assign(document.createElement("input"), { type: "search" }));
  const count = label.appendChild(Object.assign(document.createElement("output")));
  field.setAttribute("aria-label", `filter the rows of: ${place.getAttribute("aria-label")}`);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row) => { row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word)); });
    count.textContent = words.length ? ` ${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
  });
  place.before(label);
});
