// The list of jobs: progress as it happens, the list itself again when a job has changed its state, and what is done to
// those that are ticked.
import { Parts } from "./parts.js";
import { isBehind, Stream } from "./stream.js";
import { brief, count, short } from "./texts.js";

const live = document.getElementById("live");
const parts = new Parts(["list"], { replaced: onList, failed: onLost });
let stream = null;
let followed = "";
// Job -> the cursor behind the events that its row shows.
let rendered = new Map();
// Job -> its last progress, and the cursor behind it.
const latest = new Map();
// When the list was rendered, for the durations of what runs.
let listed = performance.now();

function follow() {
  rendered = new Map(JSON.parse(document.getElementById("followed").textContent));
  const jobs = [...rendered.keys()];
  if (stream && JSON.stringify(jobs) === followed) return;
  stream?.stop();
  stream = null;
  followed = JSON.stringify(jobs);
  if (!jobs.length) return;
  stream = new Stream(jobs, [...rendered.values()].join("~"), { event: onEvent, state: onState, lost: onLost, live: onLive });
}

function row(job) {
  return document.querySelector(`tr[data-job="${CSS.escape(job)}"]`);
}

function onEvent(job, message, cursor) {
  if (message.event.type !== "progress") return;
  latest.set(job, [message, cursor]);
  if (!show(job, message, cursor)) parts.refresh();
}

// Returns whether the row of the job has the progress; it may have no place for it yet.
function show(job, { event, eta_seconds: eta }, cursor) {
  // The list may have been read again since, and be ahead of the stream.
  if (!isBehind(cursor, rendered.get(job) ?? "0-0")) return true;
  const found = row(job);
  const bar = found?.querySelector(".progress progress");
  if (!bar) return false;
  bar.value = event.step;
  const steps = found.querySelector(".progress .steps");
  // What trains nothing has no steps: those of its progress are of any kind.
  if (bar.dataset.works !== undefined) steps.textContent = `${Math.round((100 * event.step) / bar.max)} %`;
  else {
    steps.textContent = `${count(event.step)} of ${count(bar.max)}`;
    steps.title = `${event.step} of ${bar.max} steps`;
  }
  found.querySelector(".eta").textContent = Number.isFinite(eta) ? `${brief(eta)} left` : "";
  if (typeof event.metrics.loss === "number") found.querySelector(".loss .value").textContent = short(event.metrics.loss);
  else if (event.not_finite?.includes("loss")) found.querySelector(".loss .value").textContent = "";
  return true;
}

function onState(job, state) {
  if (row(job)?.dataset.state !== state) parts.refresh();
}

function onLost() {
  live.textContent = "The service does not answer; trying again.";
}

function onLive() {
  live.textContent = "";
}

// A list that was rendered before the last events of the stream is behind them.
function onList() {
  onLive();
  listed = performance.now();
  offer();
  follow();
  for (const [job, [message, cursor]] of latest) {
    if (rendered.has(job)) show(job, message, cursor);
    else latest.delete(job);
  }
}

// Without scripts, ticked jobs can be compared only: each of them is cancelled or deleted by a form of its own page.
function offer() {
  for (const button of document.querySelectorAll("[data-act]")) button.hidden = false;
}

// One job after the other: a token may have a limit of requests per second.
async function act(action) {
  const form = document.querySelector("form.selectable");
  const jobs = [...form.querySelectorAll("input[name=job]:checked")].map((box) => box.value);
  const kept = action === "cancel" ? "Their checkpoints stay." : "Their checkpoints stay, their logs and curves do not.";
  if (!jobs.length || !confirm(`${action === "cancel" ? "Cancel" : "Delete"} ${jobs.length} jobs? ${kept}`)) return;
  const refused = [];
  for (const job of jobs) {
    const body = new URLSearchParams({ form_token: form.dataset.formToken });
    try {
      const answer = await fetch(`/jobs/${encodeURIComponent(job)}/${action}`, { method: "POST", body, redirect: "manual" });
      if (answer.type === "opaqueredirect") {
        row(job)?.querySelector("input[name=job]").click();
        continue;
      }
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      refused.push(page.querySelector("[role=alert]")?.textContent ?? `${job}: ${answer.status}`);
    } catch {
      refused.push(`${job}: the service does not answer`);
    }
  }
  await parts.fetch();
  live.textContent = refused.join(" ");
}

document.addEventListener("click", (event) => {
  const fold = event.target.closest("a.fold");
  if (fold && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    history.replaceState(null, "", fold.href);
    parts.fetch();
  }
  // A row leads where its name does.
  const link = event.target.closest("a, label, button, .tick") ? null : event.target.closest("tbody tr")?.querySelector("a.job");
  if (link && !String(getSelection())) {
    if (event.ctrlKey || event.metaKey) open(link.href, "_blank", "noopener");
    else link.click();
  }
  const action = event.target.closest("[data-act]")?.dataset.act;
  if (action) act(action);
});

function countUp() {
  for (const cell of document.querySelectorAll("[data-seconds]")) {
    cell.textContent = brief(Number(cell.dataset.seconds) + (performance.now() - listed) / 1000);
  }
}

offer();
follow();
setInterval(countUp, 1000);
parts.every(30000); // jobs of others, reasons of waiting ones, and how long ago everything was
