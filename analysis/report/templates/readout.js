// Shows time, phase and the value of every line at the pointer; hides and shows lines.
"use strict";

// Index of the last of some rising numbers that is at most x; -1 if all are larger.
function lastIndexUpTo(numbers, x) {
  let [low, high] = [0, numbers.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= x) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function readout(section, doc) {
  const renderers = new Map(
    [...doc.all_models].filter((model) => model.type === "GlyphRenderer").map((model) => [model.name, model]));
  const column = (name, field) => renderers.get(name).data_source.data[field];
  const unit = section.querySelector("[data-time]").dataset.time;
  const text = (value, valueUnit, digits = 2) => (Number.isFinite(value) ? `${value.toFixed(digits)} ${valueUnit}` : "-");
  const keys = [...section.querySelectorAll("[data-line]")];

  // Rates of d2h are negative on the axis.
  const valueAt = (name, x) => {
    if (!renderers.has(name)) return undefined;
    const { glyph, data_source: { data } } = renderers.get(name);
    if (x > data.x[data.x.length - 1]) return undefined;
    const index = lastIndexUpTo(data.x, x);
    // An area of a stack lies between two columns.
    return glyph.type === "VAreaStep" ? data[glyph.y2.field][index] - data[glyph.y1.field][index] : Math.abs(data.y[index]);
  };
  const phaseAt = (x) => {
    for (const phase of ["forward", "backward", "update"].filter((name) => renderers.has(name))) {
      const index = lastIndexUpTo(column(phase, "left"), x);
      if (index >= 0 && column(phase, "right")[index] > x) return `iteration ${column(phase, "iteration")[index]}, ${phase}`;
    }
    return "";
  };
  const show = (x) => {
    section.querySelector("[data-time]").textContent = `${x.toFixed(3)} ${unit}`;
    section.querySelector("[data-phase]").textContent = phaseAt(x);
    for (const key of keys) key.querySelector("b").textContent = text(valueAt(key.dataset.line, x), key.dataset.unit, key.dataset.digits);
    const free = section.querySelector("[data-free]");
    if (free) free.querySelector("b").textContent = text(free.dataset.free - valueAt(free.dataset.above, x), free.dataset.unit);
  };
  for (const key of keys) {
    const name = key.dataset.line;
    key.addEventListener("click", () => {
      const visible = !renderers.get(name).visible;
      for (const part of [name, `${name}/area`, `${name}/above peak`]) {
        if (renderers.has(part)) renderers.get(part).visible = visible;
      }
      key.ariaPressed = String(visible);
    });
  }
  for (const model of doc.all_models) {
    if (model.type === "Figure") {
      model.on_event("mousemove", (event) => show(event.x));
      model.on_event("tap", (event) => show(event.x));
    }
  }
}
