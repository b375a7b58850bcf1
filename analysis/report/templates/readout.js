// What the lines of a timeline say where the pointer is, and which of them are drawn.
"use strict";

// The place of the last of some rising figures that is not above x; -1 where all are.
function placeOf(figures, x) {
  let [low, high] = [0, figures.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (figures[middle] <= x) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function readout(section, doc) {
  const drawn = new Map([...doc.all_models].filter((model) => model.type === "GlyphRenderer").map((model) => [model.name, model]));
  const column = (name, of) => drawn.get(name).data_source.data[of];
  const unit = section.querySelector("[data-time]").dataset.time;
  const text = (value, of) => (!Number.isFinite(value) ? "–" : `${value.toFixed(2)} ${of}`);
  const keys = [...section.querySelectorAll("[data-line]")];

  const valueAt = (name, x) => {
    if (!drawn.has(name)) return undefined;
    const times = column(name, "x");
    return x > times[times.length - 1] ? undefined : column(name, "y")[placeOf(times, x)];
  };
  const phaseAt = (x) => {
    for (const phase of ["forward", "backward", "update"].filter((name) => drawn.has(name))) {
      const place = placeOf(column(phase, "left"), x);
      if (place >= 0 && column(phase, "right")[place] > x) return `iteration ${column(phase, "iteration")[place]}, ${phase}`;
    }
    return "";
  };
  const show = (x) => {
    section.querySelector("[data-time]").textContent = `${x.toFixed(3)} ${unit}`;
    section.querySelector("[data-where]").textContent = phaseAt(x);
    for (const key of keys) key.querySelector("b").textContent = text(valueAt(key.dataset.line, x), key.dataset.unit);
    const free = section.querySelector("[data-free]");
    if (free) free.querySelector("b").textContent = text(free.dataset.free - valueAt(free.dataset.above, x), free.dataset.unit);
  };
  for (const key of keys) {
    key.addEventListener("click", () => {
      const line = drawn.get(key.dataset.line);
      line.visible = !line.visible;
      key.ariaPressed = String(line.visible);
    });
  }
  for (const model of doc.all_models) {
    if (model.type === "Figure") {
      model.on_event("mousemove", (event) => show(event.x));
      model.on_event("tap", (event) => show(event.x));
    }
  }
}
