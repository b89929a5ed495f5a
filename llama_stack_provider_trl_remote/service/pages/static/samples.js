// The answers to a job's prompts as they are added.
import { Parts } from "./parts.js";
import { Stream } from "./stream.js";

const main = document.getElementById("main");
const live = document.getElementById("live");
const ENDED = ["completed", "failed", "cancelled"];
const parts = new Parts(["samples"], { replaced: onLive, failed: onLost });

function state() {
  return document.getElementById("samples").dataset.state;
}

function onEvent(_, { event }) {
  // An attempt that begins again takes back what an earlier one did beyond its checkpoint.
  const grows = document.getElementById("samples").dataset.grows !== undefined;
  if (grows && event.type === "progress") parts.refresh(5000);
  if (["samples", "rollout", "prepared"].includes(event.type)) parts.refresh();
}

function onState(_, found) {
  if (found === "deleted") location.assign("/");
  else if (found !== state()) parts.refresh();
}

function onLost() {
  live.textContent = "The service does not answer; trying again.";
}

function onLive() {
  live.textContent = "";
}

if (!ENDED.includes(state())) {
  new Stream([main.dataset.job], main.dataset.after, { event: onEvent, state: onState, lost: onLost, live: onLive });
}
