// The page of a job: its curves, progress and log as they grow.
import { Charts } from "./charts.js";
import { Curves } from "./curves.js";
import { Stream } from "./stream.js";

const main = document.getElementById("main");
const job = main.dataset.job;
const path = `/v1/post-training/jobs/${encodeURIComponent(job)}`;
const live = document.getElementById("live");
const log = document.getElementById("log");
const curves = new Curves();
const charts = window.Plotly && new Charts(curves, marks(), fetchSeries);
const LONGEST_LINE = 2000;

function marks() {
  return JSON.parse(document.getElementById("marks").textContent);
}

async function fetchSeries(options = {}) {
  const answer = await fetch(`${path}/series?${new URLSearchParams(options)}`);
  if (answer.status === 401) location.reload();
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

const shown = {
  loss: (value) => value.toPrecision(5),
  tokens_per_second: (value) => value.toPrecision(5),
  epoch: (value) => value.toPrecision(5),
  peak_memory_bytes: (value) => `${(value / 2 ** 20).toFixed(0)} MiB`,
};

function onEvent(_, event) {
  const changed = curves.add(event);
  if (changed.length) {
    document.getElementById("curves").hidden = false;
    charts?.changed(changed);
  }
  if (event.type !== "progress") return;
  for (const [name, text] of Object.entries(shown)) {
    const value = event.metrics[name] ?? event[name];
    if (typeof value === "number") document.getElementById(`now-${name}`).textContent = text(value);
  }
  const bar = document.getElementById("progress");
  if (!bar) return;
  bar.value = event.step;
  document.getElementById("steps").textContent = `${event.step} of ${bar.max} steps`;
}

// Buttons, attempts and reasons are rendered by the service: once the state is another one, so is the page.
function onState(_, state) {
  if (state === "deleted") location.assign("/");
  else if (state !== main.dataset.state) location.reload();
}

async function followLog() {
  if (!document.hidden) {
    try {
      const answer = await fetch(`${path}/logs?tail=200&size=65536`);
      if (answer.ok) showLog(await answer.text());
    } catch {
      // The stream reports that the service does not answer.
    }
  }
  setTimeout(followLog, 3000);
}

function showLog(text) {
  const lines = text.trimEnd().split("\n").map((line) =>
    line.length > LONGEST_LINE ? `${line.slice(0, LONGEST_LINE)} ... (the line has ${line.length} characters)` : line,
  );
  const wanted = lines.join("\n");
  if (wanted === log.textContent || !wanted) return;
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 20;
  log.textContent = wanted;
  if (atEnd) log.scrollTop = log.scrollHeight;
}

for (const form of document.querySelectorAll("form[data-question]")) {
  form.addEventListener("submit", (event) => {
    if (!confirm(form.dataset.question)) event.preventDefault();
  });
}

async function begin() {
  try {
    const series = await fetchSeries();
    curves.replace(series);
    if (curves.metrics.train.size + curves.metrics.validation.size) {
      document.getElementById("curves").hidden = false;
      charts?.all();
    }
    if (["completed", "failed", "cancelled"].includes(main.dataset.state)) return;
    const lost = () => (live.textContent = "The service does not answer; trying again.");
    new Stream([job], series.next, { event: onEvent, state: onState, lost, live: () => (live.textContent = "") });
    if (log) followLog();
  } catch {
    live.textContent = "The service does not answer; trying again.";
    setTimeout(begin, 2000);
  }
}

log.scrollTop = log.scrollHeight;
begin();
