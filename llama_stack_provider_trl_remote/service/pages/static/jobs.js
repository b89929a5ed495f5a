// The list of jobs: progress as it happens, and the list itself again when a job has changed its state.
import { Stream } from "./stream.js";

const live = document.getElementById("live");
let stream = null;
let timer = 0;

function follow() {
  stream?.close();
  stream = null;
  const jobs = JSON.parse(document.getElementById("followed").textContent);
  if (!jobs.length) return;
  stream = new Stream(jobs, "", { event: onEvent, state: onState, lost: onLost, live: onLive });
}

function row(job) {
  return document.querySelector(`tr[data-job="${CSS.escape(job)}"]`);
}

function onEvent(job, event) {
  if (event.type !== "progress") return;
  const cell = row(job)?.querySelector(".progress");
  const bar = cell?.querySelector("progress");
  if (!bar) return reload();
  bar.value = event.step;
  cell.querySelector(".steps").textContent = `${event.step} of ${bar.max}`;
}

function onState(job, state) {
  if (row(job)?.dataset.state !== state) reload();
}

function onLost() {
  live.textContent = "The service does not answer; trying again.";
}

function onLive() {
  live.textContent = "";
}

// Several jobs change at once when one ends: one request for all.
function reload() {
  timer ||= setTimeout(async () => {
    timer = 0;
    try {
      const answer = await fetch(location.href);
      if (answer.status === 401) return location.reload();
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const list = page.getElementById("list");
      if (!list) return;
      document.getElementById("list").replaceWith(list);
      follow();
    } catch {
      onLost();
    }
  }, 500);
}

follow();
setInterval(() => document.hidden || reload(), 30000); // jobs of others, and reasons of waiting ones
