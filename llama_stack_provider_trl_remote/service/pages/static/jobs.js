// The list of jobs: progress as it happens, and the list itself again when a job has changed its state.
import { Parts } from "./parts.js";
import { Stream } from "./stream.js";

const live = document.getElementById("live");
const parts = new Parts(["list"], { replaced: onList, failed: onLost });
let stream = null;
let followed = null;

function follow() {
  const text = document.getElementById("followed").textContent;
  if (stream && text === followed) return;
  stream?.close();
  stream = null;
  followed = text;
  const jobs = JSON.parse(text);
  if (!jobs.length) return;
  stream = new Stream(jobs, "", { event: onEvent, state: onState, lost: onLost, live: onLive });
}

function row(job) {
  return document.querySelector(`tr[data-job="${CSS.escape(job)}"]`);
}

function onEvent(job, { event }) {
  if (event.type !== "progress") return;
  const cell = row(job)?.querySelector(".progress");
  const bar = cell?.querySelector("progress");
  if (!bar) return parts.refresh();
  bar.value = event.step;
  cell.querySelector(".steps").textContent = `${event.step} of ${bar.max}`;
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

function onList() {
  onLive();
  follow();
}

follow();
parts.every(30000); // jobs of others, and reasons of waiting ones
