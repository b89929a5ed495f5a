// The page of a log: what its rank writes is added while the job runs.
import { followLog } from "./logs.js";

const { job, rank, attempt, state: shown, followed } = document.getElementById("main").dataset;
const live = document.getElementById("live");
const log = document.getElementById("log");
const SIZE = 2 ** 20; // as much as the page has

async function state() {
  try {
    const answer = await fetch(`/v1/post-training/events?${new URLSearchParams({ job })}`);
    if (answer.status === 401) location.reload();
    live.textContent = "";
    if (answer.status === 404) return "deleted";
    return answer.ok ? (await answer.json()).data[0].state : null;
  } catch {
    live.textContent = "The service does not answer; trying again.";
    return null;
  }
}

const query = new URLSearchParams({ rank, attempt, tail: 5000, size: SIZE });
// A search has no log: each of its trials has.
if (followed !== undefined) followLog(log, `/v1/post-training/jobs/${encodeURIComponent(job)}/logs?${query}`, shown, state);
