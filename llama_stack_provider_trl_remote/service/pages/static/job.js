// The page of a job: its curves, progress and log as they grow.
import { Charts } from "./charts.js";
import { Curves, groups, ordered } from "./curves.js";
import { followLog } from "./logs.js";
import { Parts } from "./parts.js";
import { Stream } from "./stream.js";
import { duration, number, size, stepTime } from "./texts.js";

const main = document.getElementById("main");
const job = main.dataset.job;
const path = `/v1/post-training/jobs/${encodeURIComponent(job)}`;
const live = document.getElementById("live");
const log = document.getElementById("log");
const curves = new Curves();
const headline = document.getElementById("headline");

// The charts of a job in their sections.
class Sections extends Charts {
  grouped() {
    return ordered(groups(this.names()), headline.dataset.first);
  }

  place(group) {
    if (group.section) return super.place(group);
    headline.hidden = false;
    return headline;
  }

  // Plotly follows the window alone: charts that stand beside a new one are narrower than before.
  add(group) {
    const chart = super.add(group, !group.section);
    if (!group.section) for (const one of headline.querySelectorAll(".js-plotly-plot")) window.Plotly.Plots.resize(one);
    return chart;
  }

  layout(group) {
    const found = super.layout(group);
    if (group.section) return found;
    found.height = (headline.querySelector(".chart") ?? document.querySelector(".whole .chart")).clientHeight;
    return found;
  }
}

const charts = window.Plotly && new Sections(curves, marks(document), fetchSeries);
// What the service renders: buttons, reasons, attempts, checkpoints and warnings.
const parts = new Parts(["status", "warnings", "trials", "export", "result", "attempts", "checkpoints", "exports"], {
  replaced: (page) => page.getElementById("marks") && charts?.mark(marks(page)),
});
const ENDED = ["completed", "failed", "cancelled"];
const MOST_POINTS = 4000;
let lost = false;
let meanwhile = null;

function marks(page) {
  return JSON.parse(page.getElementById("marks").textContent);
}

function state() {
  return document.getElementById("status").dataset.state;
}

async function fetchSeries(options = null) {
  // The address of all curves is the one that the page preloads.
  const answer = await fetch(options ? `${path}/series?${new URLSearchParams(options)}` : `${path}/series`);
  if (answer.status === 401) location.reload();
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

const shown = { loss: number, tokens_per_second: number, epoch: number, peak_memory_bytes: size };

function onEvent(_, message) {
  const { event } = message;
  const changed = curves.add(message);
  meanwhile?.push(message);
  if (changed.length) {
    document.getElementById("curves").hidden = false;
    charts?.changed(changed);
  }
  if (!meanwhile && curves.metrics.train.get("loss")?.step.length > MOST_POINTS) thinOut();
  if (["prepared", "checkpoint", "checkpoint_damaged", "warning"].includes(event.type)) parts.refresh();
  const evaluated = message.point?.kind === "validation" && message.point.metrics.eval_loss;
  if (typeof evaluated === "number") document.getElementById("now-eval_loss").textContent = number(evaluated);
  if (event.type !== "progress") return;
  for (const [name, text] of Object.entries(shown)) {
    const value = event.metrics[name] ?? event[name];
    if (typeof value === "number") document.getElementById(`now-${name}`).textContent = text(value);
    else if (event.not_finite?.includes(name)) document.getElementById(`now-${name}`).textContent = "";
  }
  const bar = document.getElementById("progress");
  // The service had not read how many steps there are when it rendered the page.
  if (!bar) return parts.refresh();
  bar.value = event.step;
  const steps = document.getElementById("steps");
  const isTraining = steps.dataset.works === undefined;
  steps.textContent = isTraining ? `${event.step} of ${bar.max} ${bar.max === 1 ? "step" : "steps"}` : `${Math.round((100 * event.step) / bar.max)} %`;
  const eta = document.getElementById("now-eta");
  if (eta) eta.textContent = duration(message.eta_seconds);
  const left = bar.max - event.step;
  if (left > 0 && message.eta_seconds) document.getElementById("now-step_seconds").textContent = stepTime(message.eta_seconds / left);
}

// A page that is open for days: the service thins the points out, and those that arrive in the meantime are added again.
async function thinOut() {
  meanwhile = [];
  try {
    curves.replace(await fetchSeries());
    for (const message of meanwhile) curves.add(message);
    charts?.all();
  } catch {
    // The points that are drawn stay; the next one tries again.
  } finally {
    meanwhile = null;
  }
}

function onState(_, found) {
  if (found === "deleted") location.assign("/");
  else if (found !== state()) parts.refresh();
}

function onLost() {
  lost = true;
  live.textContent = "The service does not answer; trying again.";
}

function onLive() {
  lost = false;
  live.textContent = "";
}

const rendered = state();
// When a waiting job starts is said relative to now, and no event tells that it has changed, or why a new one waits.
const [WAITING_MS, UNEXPLAINED_MS] = [30_000, 2000];
setInterval(() => document.hidden || state() !== "scheduled" || parts.refresh(), WAITING_MS);
setInterval(() => document.hidden || document.getElementById("status").dataset.unexplained === undefined || parts.refresh(), UNEXPLAINED_MS);

async function begin() {
  try {
    const series = await fetchSeries();
    performance.mark("points"); // benchmarks.dashboard reads it
    curves.replace(series);
    if (curves.metrics.train.size + curves.metrics.validation.size) {
      document.getElementById("curves").hidden = false;
      charts?.all();
    }
    onLive();
    if (ENDED.includes(state())) return;
    new Stream([job], series.next, { event: onEvent, state: onState, lost: onLost, live: onLive });
    // A search has no log: each of its trials has.
    if (log.dataset.followed !== undefined) followLog(log, `${path}/logs?tail=200&size=65536`, rendered, () => (lost ? null : state()));
  } catch {
    onLost();
    setTimeout(begin, 2000);
  }
}

log.scrollTop = log.scrollHeight;
begin();
