// Uploads of files that are dropped on the page of datasets, one after the other, each with its progress.
import { Parts } from "./parts.js";
import { size } from "./texts.js";

const zone = document.getElementById("upload");
const list = document.getElementById("uploads");
const ENDING = /(\.(jsonl|ndjson|json|csv|parquet))(\.(gz|zst))?$/i;
let last = Promise.resolve();
const parts = new Parts(["datasets"]);

function line(file) {
  const item = document.createElement("li");
  const name = document.createElement("span");
  const bar = document.createElement("progress");
  const state = document.createElement("span");
  name.textContent = file.name;
  bar.max = file.size || 1;
  bar.value = 0;
  bar.setAttribute("aria-label", `Upload of ${file.name}`);
  state.textContent = "waits";
  item.append(name, bar, state);
  list.append(item);
  return { item, bar, state };
}

// fetch() reports no progress of what it sends.
function send(file, dataset, { item, bar, state }) {
  return new Promise((ended) => {
    const request = new XMLHttpRequest();
    request.open("POST", `/data/upload?${new URLSearchParams({ dataset, file: file.name })}`);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.setRequestHeader("X-Form-Token", zone.dataset.formToken);
    request.upload.addEventListener("progress", ({ loaded }) => {
      bar.value = loaded;
      state.textContent = loaded < file.size ? `${size(loaded)} of ${size(file.size)}` : "the service reads it ...";
    });
    request.addEventListener("loadend", () => {
      bar.remove();
      let answer = {};
      try {
        answer = JSON.parse(request.responseText);
      } catch {
        answer.detail = request.status ? `the service answers ${request.status}` : "the service does not answer";
      }
      if (request.status === 201) {
        const link = document.createElement("a");
        link.href = answer.page;
        link.textContent = answer.dataset_id;
        state.replaceChildren(link, `: ${answer.num_rows} ${answer.num_rows === 1 ? "row" : "rows"}`);
        parts.refresh();
      } else {
        item.classList.add("wrong");
        state.textContent = typeof answer.detail === "string" ? answer.detail : "it was refused";
      }
      ended(request.status === 201);
    });
    request.send(file);
  });
}

function add(files) {
  for (const file of files) {
    const shown = line(file);
    const dataset = file.name.replace(ENDING, "");
    last = last.then(() => send(file, dataset, shown));
  }
}

if (zone) {
  zone.hidden = false;
  const input = zone.querySelector("input");
  input.addEventListener("change", () => {
    add(input.files);
    input.value = "";
  });
  for (const name of ["dragenter", "dragover"]) {
    zone.addEventListener(name, (event) => {
      event.preventDefault();
      zone.classList.add("over");
    });
  }
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    add(event.dataTransfer.files);
  });
  // A file beside the zone would replace the page.
  for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());
}
