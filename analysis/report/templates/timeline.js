// Draws a timeline when its rank is first shown, in the colours of the page.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");

// Bokeh draws on a canvas, which style sheets do not reach. Tags of a model are names of CSS variables: the first is its
// fill, the second (else the first) its line.
function paint(doc) {
  document.documentElement.dataset.painted = dark.matches ? "dark" : "light";
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const text = { color: color("muted"), font: color("font"), font_style: "normal" };
  const labels = Object.fromEntries(["major_label", "axis_label"].flatMap(
    (part) => Object.entries(text).map(([property, value]) => [`${part}_text_${property}`, value])));
  for (const model of doc.all_models) {
    if (model.type === "LinearAxis") {
      if (model.tags.includes("unsigned")) hideSigns(model.formatter);
      model.setv({ ...labels, axis_line_color: color("rule"), major_tick_line_color: color("rule"), minor_tick_line_color: null });
    } else if (model.type === "Grid") {
      model.grid_line_color = color("rule");
    } else if (model.tags.length) {
      const [fill, line = fill] = model.tags.map(color);
      for (const part of [model, model.glyph, model.hover_glyph]) {
        if (part && "fill_color" in part) part.fill_color = fill;
        if (part && "line_color" in part) part.line_color = line;
      }
    }
  }
}

// Tick labels without a minus sign. Bokeh's own way to do so evaluates code, which the page's policy forbids.
function hideSigns(formatter) {
  if (Object.hasOwn(formatter, "doFormat")) return;
  const format = formatter.doFormat.bind(formatter);
  formatter.doFormat = (ticks, options) => format(ticks, options).map((label) => label.replace(/^[-−]/, ""));
}

async function show(rank) {
  for (const view of document.querySelectorAll(".rank")) view.hidden = view.dataset.rank !== rank;
  for (const link of document.querySelectorAll("nav [data-section]")) {
    link.hash = `${link.dataset.section}-${rank}`;
    link.hidden = !document.getElementById(link.hash.slice(1));
  }
  const element = document.getElementById(`timeline-${rank}`);
  if (!element || element.childElementCount) return;
  const item = JSON.parse(document.getElementById(`data-${rank}`).textContent);
  await Bokeh.embed.embed_item(item, element.id);
  const doc = Bokeh.documents.find((candidate) => candidate.get_model_by_id(item.root_id));
  paint(doc);
  readout(element.closest(".rank"), doc);
  controls(element.closest(".rank"), doc);
}

const select = document.getElementById("rank");
if (select) select.addEventListener("change", () => show(select.value));
const first = document.querySelector(".rank");
if (first) show(first.dataset.rank);

dark.addEventListener("change", () => { if (globalThis.Bokeh) Bokeh.documents.forEach(paint); });

// A canvas keeps its width: in print it is scaled to the page, whose width this is in pixels.
const PAPER_WIDTH = 680;
addEventListener("beforeprint", () => {
  for (const element of document.querySelectorAll(".rank:not([hidden]) .timeline")) {
    const width = element.offsetWidth;
    Object.assign(element.style, { width: `${width}px`, zoom: Math.min(1, PAPER_WIDTH / width) });
  }
});
addEventListener("afterprint", () => {
  for (const element of document.querySelectorAll(".timeline")) Object.assign(element.style, { width: "", zoom: "" });
});
