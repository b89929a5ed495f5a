// The form of a new job: the service's answer to it while it is filled in.
import { replacePart } from "./parts.js";

const WAIT_MS = 800;
const form = document.getElementById("new-job");
const live = document.getElementById("live");
const queue = document.getElementById("queue");
const address = new URLSearchParams(location.search);
// Of one login, kind of job, and what the form began with.
const draft = ["new-job", form.elements.form_token.value, form.elements.kind.value, form.elements.draft.value].join(" ");
let timer = 0;
let busy = false;
let again = false;
let changes = 0;

// As preset_of in job_form.py.
function markPreset() {
  let isFound = false;
  for (const link of document.querySelectorAll("[data-preset]")) {
    const fits = !isFound && Object.entries(JSON.parse(link.dataset.preset)).every(([name, value]) => form.elements[name].value === value);
    isFound ||= fits;
    if (fits) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

// Where the browser refuses storage, or has no room, nothing is kept.
function keep() {
  try {
    sessionStorage.setItem(draft, JSON.stringify([...new FormData(form)]));
  } catch {
    forget();
  }
}

function forget() {
  try {
    sessionStorage.removeItem(draft);
  } catch {}
}

function read() {
  try {
    return JSON.parse(sessionStorage.getItem(draft) ?? "[]");
  } catch {
    return [];
  }
}

// What was filled in before the page was left; what the address names is newer, and so is a form that was sent.
function restore() {
  const kept = read().filter(([name]) => form.elements[name]?.type !== "hidden" && !address.has(name));
  if ("posted" in form.dataset || !kept.length || address.has("preset") || address.has("options")) return;
  for (const box of form.querySelectorAll("[type=checkbox]")) box.checked = false; // one that is not ticked is not sent
  for (const [name, value] of kept) {
    const field = form.elements[name];
    if (field?.type === "checkbox") field.checked = true;
    else if (field) field.value = value;
  }
  const said = document.getElementById("kept");
  said.hidden = false;
  said.querySelector("button").addEventListener("click", () => {
    forget();
    location.assign(`/new${location.search}`); // without a field's place, with which the page would not be loaded again
  });
}

// The fields that the answer names, by their labels.
function mark() {
  for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  for (const link of document.querySelectorAll("#answer [data-field]")) {
    const field = form.elements[link.dataset.field];
    if (!field) continue;
    if (link.closest("[role=alert]")) field.setAttribute("aria-invalid", "true");
    link.textContent = field.labels[0].textContent;
  }
}

// What is shown is of the fields as they were: a problem may be repaired by now.
function soon() {
  changes += 1;
  document.querySelector("#answer [role=alert]")?.remove();
  mark();
  document.getElementById("answer").setAttribute("aria-busy", "true");
  live.textContent = "Changed: to be checked ...";
  clearTimeout(timer);
  timer = setTimeout(check, WAIT_MS);
}

// One at a time: a preflight takes a core for seconds.
async function check() {
  again = busy;
  if (busy) return;
  busy = true;
  const checked = changes;
  live.textContent = "Checking ...";
  try {
    const answer = await fetch("/new/check", { method: "POST", body: new URLSearchParams(new FormData(form)) });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (changes !== checked) return; // the form has changed again meanwhile, and is checked again
    live.textContent = answer.status === 401 ? "The session has ended: log in again in another tab, what is here stays." : "";
    for (const id of ["answer", "same"]) replacePart(document.getElementById(id), page.getElementById(id));
    const question = page.getElementById("queue")?.getAttribute("data-question");
    if (question) queue.setAttribute("data-question", question);
    else queue.removeAttribute("data-question");
    mark();
    if (!page.getElementById("answer")) live.textContent ||= page.querySelector("[role=alert]")?.textContent ?? "";
  } catch {
    live.textContent = "The service does not answer.";
  } finally {
    busy = false;
    if (changes === checked) document.getElementById("answer").removeAttribute("aria-busy");
    if (again) soon();
  }
}

restore();
for (const act of [keep, soon, markPreset]) form.addEventListener("input", act);
// Behind the question of early.js, to which the answer may be no.
document.addEventListener("submit", (event) => event.defaultPrevented || event.submitter?.hasAttribute("formaction") || forget());
markPreset();
mark();
if (form.elements.model?.value && form.elements.dataset?.value) soon();
