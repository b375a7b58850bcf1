// The buttons of a timeline.
"use strict";

function controls(section, doc) {
  const models = [...doc.all_models];
  const range = models.find((model) => model.type === "Figure").x_range;
  const drags = [...section.querySelectorAll("[data-drag]")];
  for (const button of drags) {
    button.addEventListener("click", () => {
      for (const model of models) if (model.type === button.dataset.drag) model.active = true;
      for (const other of drags) other.ariaPressed = String(other === button);
    });
  }
  for (const button of section.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      const middle = (range.start + range.end) / 2;
      const half = ((range.end - range.start) / 2) * button.dataset.zoom;
      const [least, most] = range.bounds;
      range.setv({ start: Math.max(middle - half, least), end: Math.min(middle + half, most) });
    });
  }
  section.querySelector("[data-reset]").addEventListener("click", () => {
    for (const model of models) if (model.type === "Figure") model.reset.emit();
  });
}
