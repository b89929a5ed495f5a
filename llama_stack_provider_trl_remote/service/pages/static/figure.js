// A chart in its frame: the menu of what can be done with it, and the dialog that shows one chart alone.

const PNG_SCALE = 2;
const KEPT_MS = 10000;

// Has the browser save a file. Of blobs the policy of the pages refuses none: nothing of them is loaded into a page.
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "-");
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), KEPT_MS);
}

// The chart as it is drawn, on the background of the page. Plotly's own PNG goes through an image of a blob, which the
// policy refuses: its SVG is a data URI.
export async function pngOf(element) {
  const [width, height] = [element.clientWidth, element.clientHeight];
  const image = new Image();
  image.src = await window.Plotly.toImage(element, { format: "svg", width, height });
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width * PNG_SCALE, height * PNG_SCALE];
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--back").trim();
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// A cell of CSV. A text that a spreadsheet would compute gets an apostrophe before it.
function cell(value) {
  if (typeof value !== "string") return value ?? "";
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// The points of some jobs: a row for each step at which one of the metrics has a value.
// jobs: pairs of a name and an answer of /series. Of a curve that is thinned a step may be left out that another one has:
// its cell is blank.
export function csvOf(jobs, names) {
  const rows = [["job", "kind", "step", "epoch", "time", ...names]];
  for (const [job, series] of jobs) {
    for (const kind of ["train", "validation"]) {
      const steps = new Map();
      names.forEach((name, column) => {
        const curve = series[kind][name];
        curve?.step.forEach((step, at) => {
          const time = new Date(curve.time[at] * 1000).toISOString();
          if (!steps.has(step)) steps.set(step, [job, kind, step, curve.epoch[at], time, ...names.map(() => null)]);
          steps.get(step)[5 + column] = curve.value[at];
        });
      });
      for (const step of [...steps.keys()].sort((a, b) => a - b)) rows.push(steps.get(step));
    }
  }
  return rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

function button(text, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", act);
  return made;
}

let dialog = null;

// The dialog for one chart, made at its first use. Escape closes it, and the chart is back in its place.
function wholeDialog() {
  if (dialog) return dialog;
  dialog = document.createElement("dialog");
  dialog.className = "whole";
  dialog.append(button("Close", () => dialog.close()));
  document.body.append(dialog);
  return dialog;
}

export class Figure {
  // on: {csv(), drawn()}; drawn: the place of the chart has another size.
  constructor(container, title, label, on) {
    this.title = title;
    this.on = on;
    this.frame = document.createElement("div");
    this.frame.className = "figure";
    this.element = document.createElement("div");
    this.element.className = "chart";
    this.element.setAttribute("role", "figure");
    this.element.setAttribute("aria-label", `${label}. Arrow keys show the values of a step`);
    this.element.tabIndex = 0;
    this.frame.append(this.element, this.makeMenu());
    container.append(this.frame);
    // It is there before it has a text: what is put in with its text is not read out.
    this.note = document.createElement("p");
    this.note.className = "chart-note";
    this.note.setAttribute("role", "status");
    this.frame.append(this.note);
  }

  // Says something of the chart below it, until the next call; "": nothing.
  say(text) {
    this.note.textContent = text;
  }

  get isWhole() {
    return this.frame.parentElement === dialog;
  }

  makeMenu() {
    const menu = document.createElement("details");
    menu.className = "chart-menu";
    const summary = document.createElement("summary");
    summary.setAttribute("aria-label", `Menu of ${this.title}`);
    summary.textContent = "⋯";
    const act = (what) => () => {
      menu.open = false;
      what();
    };
    const items = document.createElement("div");
    this.wholeButton = button("Full screen", act(() => this.toggleWhole()));
    items.append(this.wholeButton, button("CSV", act(this.on.csv)), button("PNG", act(() => this.png())));
    menu.append(summary, items);
    // A click elsewhere, and Escape, close it.
    menu.addEventListener("focusout", ({ relatedTarget }) => menu.contains(relatedTarget) || (menu.open = false));
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !menu.open) return;
      menu.open = false;
      summary.focus();
      event.preventDefault();
    });
    return menu;
  }

  async png() {
    save(await pngOf(this.element), `${document.querySelector("main").dataset.job ?? "jobs"}-${this.title}.png`);
  }

  toggleWhole() {
    if (this.isWhole) return dialog.close();
    const place = document.createElement("div");
    place.className = "figure";
    this.frame.replaceWith(place);
    wholeDialog().append(this.frame);
    dialog.setAttribute("aria-label", this.title);
    this.wholeButton.textContent = "Back to the page";
    dialog.showModal();
    // The window, and a note below the chart, change its place. Its first report is of the place as it is.
    const sizes = new ResizeObserver(() => this.on.drawn());
    sizes.observe(this.element);
    dialog.addEventListener("close", () => {
      sizes.disconnect();
      place.replaceWith(this.frame);
      this.wholeButton.textContent = "Full screen";
      this.on.drawn();
    }, { once: true });
  }
}
