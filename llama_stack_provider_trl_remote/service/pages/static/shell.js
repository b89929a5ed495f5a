// What each page has beside its contents: keyboard shortcuts, and a palette that leads to pages and jobs.

const WAIT_MS = 120;
const MOST_JOBS = 8;
// As specs/state_words.py has them.
const WORDS = { scheduled: "waiting", launching: "starting", in_progress: "running" };
const SHORTCUTS = [
  ["/", "search on this page, or in the palette"],
  ["Ctrl K", "open the palette"],
  ["j, k", "next and previous row of a list"],
  ["x", "tick the row"],
  ["Enter", "open the row"],
  ["?", "this list"],
];
const pages = [...document.querySelectorAll("header nav a")].map((link) => ({
  text: link.textContent,
  to: link.getAttribute("href"),
  key: link.dataset.key,
}));
// The pages of a data directory without a service have no calls on its queue.
const hasQueue = pages.some(({ to }) => to === "/nodes");

function element(name, attributes = {}, ...contents) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...contents);
  return made;
}

// What has a name that begins with a text, then what has it in the name, then the others.
function byName(all, wanted) {
  const rank = ({ text }) => [(name) => name.startsWith(wanted), (name) => name.includes(wanted), () => true].findIndex((fits) => fits(text.toLowerCase()));
  return all.toSorted((one, other) => rank(one) - rank(other));
}

// Jobs whose names, models or tags have a text, the closest names first.
async function findJobs(text) {
  const query = new URLSearchParams({ search: text.trim(), sort: "match", limit: MOST_JOBS });
  const answer = await fetch(`/v1/post-training/queue?${query}`);
  return answer.ok ? (await answer.json()).data : [];
}

// A field for the name of a job proposes those that have what is typed.
function propose(input) {
  let asked = 0;
  let timer = 0;
  const find = async () => {
    const number = ++asked;
    const jobs = await findJobs(input.value).catch(() => []);
    if (number === asked) input.list.replaceChildren(...jobs.map((job) => element("option", { value: job.job_uuid })));
  };
  for (const event of ["input", "focus"]) {
    input.addEventListener(event, () => {
      clearTimeout(timer);
      timer = setTimeout(find, WAIT_MS);
    });
  }
}

class Palette {
  constructor() {
    this.input = element("input", {
      ...{ type: "search", role: "combobox", "aria-expanded": "true", "aria-controls": "palette-list" },
      ...{ "aria-label": "Page or job", placeholder: "Page or job", maxlength: "200", autocomplete: "off" },
    });
    this.list = element("ul", { id: "palette-list", role: "listbox", "aria-label": "Pages and jobs", class: "plain" });
    this.dialog = element("dialog", { id: "palette", "aria-label": "Go to" }, this.input, this.list);
    this.asked = 0;
    this.timer = 0;
    document.body.append(this.dialog);
    this.input.addEventListener("input", () => this.soon());
    this.input.addEventListener("keydown", (event) => this.onKey(event));
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
  }

  open() {
    if (this.dialog.open) return;
    this.input.value = "";
    this.show([]);
    this.dialog.showModal();
    this.input.focus();
    this.soon();
  }

  soon() {
    this.show([]);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.find(), WAIT_MS);
  }

  // Pages at once, jobs as soon as the service has answered the newest question.
  async find() {
    const asked = ++this.asked;
    if (!hasQueue) return;
    try {
      const jobs = await findJobs(this.input.value);
      if (asked === this.asked) this.show(jobs.map((job) => ({ text: job.job_uuid, to: `/jobs/${encodeURIComponent(job.job_uuid)}`, about: WORDS[job.state] ?? job.state })));
    } catch {
      // The pages are there without the service.
    }
  }

  show(jobs) {
    const wanted = this.input.value.trim().toLowerCase();
    const found = byName([...pages.filter(({ text }) => text.toLowerCase().includes(wanted)), ...jobs], wanted);
    if (wanted) found.push({ text: `Jobs with "${this.input.value.trim()}"`, to: `/?${new URLSearchParams({ search: this.input.value.trim() })}`, about: "search" });
    this.list.replaceChildren(
      ...found.map(({ text, to, about }, place) => {
        const line = element("li", { role: "option", id: `palette-${place}`, "aria-selected": "false" }, text, element("span", { class: "steps" }, about ?? "page"));
        line.addEventListener("click", () => location.assign(to));
        return line;
      }),
    );
    this.select(0);
  }

  select(place) {
    const all = [...this.list.children];
    this.place = Math.max(0, Math.min(place, all.length - 1));
    all.forEach((one, number) => one.setAttribute("aria-selected", String(number === this.place)));
    all[this.place]?.scrollIntoView({ block: "nearest" });
    this.input.setAttribute("aria-activedescendant", all.length ? `palette-${this.place}` : "");
  }

  onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) this.select(this.place + step);
    else if (event.key === "Enter") this.list.children[this.place]?.click();
    else return;
    event.preventDefault();
  }
}

function makeHelp() {
  const rows = [...SHORTCUTS, ...pages.map(({ key, text }) => [`g ${key}`, text])];
  const list = element("dl", {}, ...rows.map(([keys, text]) => element("div", {}, element("dt", {}, element("kbd", {}, keys)), element("dd", {}, text))));
  const close = element("form", { method: "dialog" }, element("button", {}, "Close"));
  const dialog = element("dialog", { id: "help", "aria-label": "Keyboard shortcuts" }, element("h2", {}, "Keyboard shortcuts"), list, close);
  document.body.append(dialog);
  return dialog;
}

const palette = new Palette();
const help = makeHelp();
let afterG = -Infinity;

function isTyping(target) {
  return target.closest?.("input:not([type=checkbox]), textarea, select, [contenteditable]");
}

// The rows of the page's list, by the links of their heads.
function moveTo(step) {
  const links = [...document.querySelectorAll("tbody a.job")];
  if (!links.length) return;
  const row = document.activeElement.closest("tr");
  const at = links.findIndex((link) => link.closest("tr") === row);
  links[Math.max(0, Math.min(links.length - 1, at + step))].focus();
}

const KEYS = {
  "/": () => {
    const field = document.querySelector("main [type=search]");
    if (field) {
      field.focus();
      field.select();
    }
    else palette.open();
  },
  "?": () => help.open || help.showModal(),
  j: () => moveTo(1),
  k: () => moveTo(-1),
  x: () => document.activeElement.closest("tr")?.querySelector("input[type=checkbox]")?.click(),
};

document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    palette.open();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || document.querySelector("dialog[open]")) return;
  if (event.timeStamp - afterG < 1500) {
    afterG = -Infinity;
    const page = pages.find(({ key }) => key === event.key);
    if (page) location.assign(page.to);
    return;
  }
  if (event.key === "g") {
    afterG = event.timeStamp;
    return;
  }
  if (!KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

const jump = element("button", { type: "button", class: "jump" }, "Go to ...", element("kbd", {}, "Ctrl K"));
jump.addEventListener("click", () => palette.open());
document.querySelector("header nav").before(jump);

if (hasQueue) document.querySelectorAll("input[data-jobs]").forEach(propose);
