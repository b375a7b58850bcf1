// Timelines are drawn when their rank is first shown, in the colours of the page.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");

// Bokeh paints on canvas, which style sheets do not reach: what has a tag takes the CSS variable of that name.
function paint(doc) {
  document.documentElement.dataset.painted = dark.matches ? "dark" : "light";
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const text = { color: color("muted"), font: color("font"), font_style: "normal" };
  const labels = Object.fromEntries(["major_label", "axis_label"].flatMap(
    (part) => Object.entries(text).map(([property, value]) => [`${part}_text_${property}`, value])));
  for (const model of doc.all_models) {
    if (model.type === "LinearAxis") {
      model.setv({ ...labels, axis_line_color: color("rule"), major_tick_line_color: color("rule"), minor_tick_line_color: null });
    } else if (model.type === "Grid") {
      model.grid_line_color = color("rule");
    } else if (model.tags.length) {
      for (const drawn of [model, model.glyph, model.hover_glyph]) {
        for (const property of ["line_color", "fill_color"]) {
          if (drawn && property in drawn) drawn[property] = color(model.tags[0]);
        }
      }
    }
  }
}

async function show(rank) {
  for (const view of document.querySelectorAll(".rank")) view.hidden = view.dataset.rank !== rank;
  const place = document.getElementById(`timeline-${rank}`);
  if (!place || place.childElementCount) return;
  const item = JSON.parse(document.getElementById(`data-${rank}`).textContent);
  await Bokeh.embed.embed_item(item, place.id);
  const doc = Bokeh.documents.find((candidate) => candidate.get_model_by_id(item.root_id));
  paint(doc);
  readout(place.closest(".rank"), doc);
  controls(place.closest(".rank"), doc);
}

const choice = document.getElementById("rank");
if (choice) choice.addEventListener("change", () => show(choice.value));
const first = document.querySelector(".rank");
if (first) show(first.dataset.rank);

dark.addEventListener("change", () => { if (globalThis.Bokeh) Bokeh.documents.forEach(paint); });

// A canvas keeps its width too: on paper it is scaled to the page.
const PAPER = 680;
addEventListener("beforeprint", () => {
  for (const place of document.querySelectorAll(".rank:not([hidden]) .timeline")) {
    const width = place.offsetWidth;
    Object.assign(place.style, { width: `${width}px`, zoom: Math.min(1, PAPER / width) });
  }
});
addEventListener("afterprint", () => {
  for (const place of document.querySelectorAll(".timeline")) Object.assign(place.style, { width: "", zoom: "" });
});
