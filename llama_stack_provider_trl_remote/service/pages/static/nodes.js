// The list of nodes as it changes, and how loaded they were.
import { addChart, colorOf, CONFIG, layout, onColors, plain } from "./charts.js";
import { Loads } from "./loads.js";
import { Parts } from "./parts.js";

const LOAD_MS = 30000;
const FEW = 10; // minutes that no line shows well
const live = document.getElementById("live");
const span = document.getElementById("span");
const loads = new Loads();
const charts = new Map();
const parts = new Parts(["nodes"], {
  replaced: () => (live.textContent = ""),
  failed: () => (live.textContent = "The service does not answer; trying again."),
});

function listed() {
  return [...document.querySelectorAll("#nodes tr[data-node]")].map((row) => row.dataset.node);
}

// One machine after the other: a token may have a limit of requests per second.
async function fetchLoads() {
  const nodes = listed();
  loads.keep(nodes);
  for (const node of nodes) {
    const answer = await fetch(`/v1/nodes/${encodeURIComponent(node)}/load?since=${loads.since(node)}`);
    if (answer.status === 401) return location.reload();
    if (answer.ok) loads.add(node, await answer.json());
  }
}

async function draw() {
  for (const { title, traces } of loads.charts(Number(span.value))) {
    const drawn = traces.map(({ x, y, name, place, dash }) => {
      const line = { width: 1.5, dash, color: colorOf(place) };
      const mode = x.length < FEW ? "lines+markers" : "lines";
      return { x, y, name: plain(name), line, mode, type: "scatter", showlegend: true };
    });
    if (!charts.has(title)) charts.set(title, addChart(document.getElementById("charts"), `${title} by time`));
    const shown = layout(title, "", span.value);
    shown.yaxis.rangemode = "tozero";
    await window.Plotly.react(charts.get(title), drawn, shown, CONFIG);
    await new Promise((next) => setTimeout(next));
  }
}

async function follow() {
  try {
    if (!document.hidden) {
      await fetchLoads();
      await draw();
    }
  } catch {
    // The list of nodes reports that the service does not answer.
  } finally {
    setTimeout(follow, LOAD_MS);
  }
}

parts.every(5000);
if (window.Plotly && span) {
  span.addEventListener("change", draw);
  onColors(draw);
  follow();
}
