// One cursor for all charts of a page: where the pointer, or the arrow keys, are in one of them, the others show the
// values at the same place of their axes.
import { legendText, number } from "./texts.js";

const PAGE = 10; // parts of a curve: Page Up and Page Down go over one

export class Cursor {
  constructor() {
    this.visible = new Set();
    this.waiting = 0;
    this.observer = new IntersectionObserver((changes) => {
      for (const { target, isIntersecting } of changes) this.visible[isIntersecting ? "add" : "delete"](target);
    });
    this.readout = document.createElement("p");
    this.readout.className = "hidden";
    this.readout.setAttribute("role", "status");
    this.readout.id = "readout";
    document.getElementById("curves").append(this.readout);
  }

  // element: a chart that plotly has drawn.
  add(element) {
    this.observer.observe(element);
    element.on("plotly_hover", ({ xvals }) => xvals && this.show(xvals[0], element));
    element.on("plotly_unhover", () => this.hide());
    element.addEventListener("keydown", (event) => this.onKey(event, element));
    element.addEventListener("blur", () => this.hide());
  }

  // x: a place on the axis, a text where that is of times. from: the chart that shows it already.
  show(x, from = null) {
    cancelAnimationFrame(this.waiting);
    this.waiting = requestAnimationFrame(() => {
      const xval = placeOf(x);
      for (const element of this.visible) if (element !== from && element.isConnected) window.Plotly.Fx.hover(element, { xval });
    });
  }

  hide() {
    cancelAnimationFrame(this.waiting);
    for (const element of this.visible) if (element.isConnected) window.Plotly.Fx.unhover(element);
  }

  onKey(event, element) {
    if (event.target !== element || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "Escape" && this.at?.element === element) {
      this.at = null;
      event.preventDefault();
      return this.hide();
    }
    const places = placesOf(element);
    const last = places.length - 1;
    if (last < 0) return;
    const now = this.at?.element === element ? Math.min(this.at.place, last) : null;
    const part = Math.max(1, Math.round(places.length / PAGE));
    const moves = { ArrowLeft: [-1, last], ArrowRight: [1, 0], PageUp: [-part, last], PageDown: [part, 0] };
    const ends = { Home: 0, End: last };
    let place = ends[event.key];
    if (moves[event.key]) {
      const [step, first] = moves[event.key];
      place = now === null ? first : Math.max(0, Math.min(last, now + step));
    }
    if (place === undefined) return;
    event.preventDefault();
    this.at = { element, place };
    this.show(places[place]);
    this.readout.textContent = readoutOf(element, places[place]);
  }
}

// As plotly places a point: times in milliseconds.
function placeOf(x) {
  return typeof x === "string" ? Date.parse(`${x.replace(" ", "T").replace(/Z$/, "")}Z`) : x;
}

// The curves of a chart, without its marks, that its legend names.
function curvesOf(element) {
  return element.data.filter((curve) => curve.yaxis !== "y2" && curve.showlegend !== false);
}

function placesOf(element) {
  const [from, to] = element.layout.xaxis.range.map(placeOf);
  const all = new Set(curvesOf(element).flatMap((curve) => [...curve.x]));
  return [...all].filter((x) => placeOf(x) >= from && placeOf(x) <= to).sort((a, b) => placeOf(a) - placeOf(b));
}

// What a chart shows at a place, in words: of each curve the value there.
function readoutOf(element, x) {
  const found = curvesOf(element).flatMap((curve) => {
    const at = curve.x.indexOf(x);
    return at < 0 || curve.y[at] === null ? [] : [`${legendText(curve.name)} ${number(curve.y[at])}`];
  });
  return `${element.layout.xaxis.title.text} ${typeof x === "number" ? number(x) : x}: ${found.join(", ")}`;
}
