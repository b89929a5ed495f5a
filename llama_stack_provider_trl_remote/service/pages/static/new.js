// The form of a new job: the service's answer to it while it is filled in.
import { replacePart } from "./parts.js";

const WAIT_MS = 800;
const form = document.getElementById("new-job");
const live = document.getElementById("live");
let timer = 0;
let busy = false;
let again = false;

function soon() {
  clearTimeout(timer);
  timer = setTimeout(check, WAIT_MS);
}

// One at a time: a preflight takes a core for seconds.
async function check() {
  again = busy;
  if (busy) return;
  busy = true;
  live.textContent = "Checking ...";
  try {
    const answer = await fetch("/new/check", { method: "POST", body: new URLSearchParams(new FormData(form)) });
    live.textContent = answer.status === 401 ? "The session has ended: log in again in another tab, what is here stays." : "";
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const id of ["answer", "same"]) replacePart(document.getElementById(id), page.getElementById(id));
    if (!page.getElementById("answer")) live.textContent ||= page.querySelector("[role=alert]")?.textContent ?? "";
  } catch {
    live.textContent = "The service does not answer.";
  } finally {
    busy = false;
    if (again) soon();
  }
}

form.addEventListener("input", soon);
if (form.elements.model.value && form.elements.dataset.value) soon();
