// The buttons of a timeline: drag mode, zoom, reset.
"use strict";

// Zooming into a box must not cut a panel: memory begins at 0, and a link has 0 in its middle.
function keepZero(range) {
  const isLink = range.start < 0;
  range.change.connect(() => {
    const top = isLink ? Math.max(-range.start, range.end) : range.end;
    const bottom = isLink ? -top : 0;
    if (range.start !== bottom || range.end !== top) range.setv({ start: bottom, end: top });
  });
}

function controls(section, doc) {
  const models = [...doc.all_models];
  for (const model of models) if (model.type === "Figure" && model.left[0].axis_label) keepZero(model.y_range);
  const range = models.find((model) => model.type === "Figure").x_range;
  const dragButtons = [...section.querySelectorAll("[data-drag]")];
  for (const button of dragButtons) {
    button.addEventListener("click", () => {
      for (const model of models) if (model.type === button.dataset.drag) model.active = true;
      for (const other of dragButtons) other.ariaPressed = String(other === button);
    });
  }
  for (const button of section.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      const middle = (range.start + range.end) / 2;
      const half = ((range.end - range.start) / 2) * button.dataset.zoom;
      const [first, last] = range.bounds;
      range.setv({ start: Math.max(middle - half, first), end: Math.min(middle + half, last) });
    });
  }
  section.querySelector("[data-reset]").addEventListener("click", () => {
    for (const model of models) if (model.type === "Figure") model.reset.emit();
  });
}
