// The form of a new job: the service's answer to it while it is filled in.
import { replacePart } from "./parts.js";

const WAIT_MS = 800;
const form = document.getElementById("new-job");
const live = document.getElementById("live");
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

// What is shown is of the fields as they were: a problem may be repaired by now.
function soon() {
  changes += 1;
  document.querySelector("#answer [role=alert]")?.remove();
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
    if (!page.getElementById("answer")) live.textContent ||= page.querySelector("[role=alert]")?.textContent ?? "";
  } catch {
    live.textContent = "The service does not answer.";
  } finally {
    busy = false;
    if (changes === checked) document.getElementById("answer").removeAttribute("aria-busy");
    if (again) soon();
  }
}

form.addEventListener("input", soon);
form.addEventListener("input", markPreset);
markPreset();
if (form.elements.model?.value && form.elements.dataset?.value) soon();
