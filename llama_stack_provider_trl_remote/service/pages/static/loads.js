// How loaded the machines were, minute by minute, and the curves that are drawn of it. Without the page.

const MINUTE = 60;
const GIB = 2 ** 30;
const DASHES = ["solid", "dot", "dash", "longdash", "dashdot", "longdashdot"];

const of = (field, scale = 1) => (load) => [["", load[field], scale]];
const ofDevices = (field, scale = 1) => (load) =>
  Object.entries(load.devices).map(([device, values]) => [device, values[field], scale]);
const CHARTS = [
  ["CPU (%)", of("cpu_percent")],
  ["GPU (%)", ofDevices("utilization_percent")],
  ["Memory used (GiB)", of("memory_used_bytes", GIB)],
  ["GPU memory used (GiB)", ofDevices("memory_used_bytes", GIB)],
  ["Free disk (GiB)", of("disk_free_bytes", GIB)],
];

export class Loads {
  constructor() {
    this.nodes = new Map();
  }

  // The minute to request a node's load from: its last one, which was not over.
  since(node) {
    return this.nodes.get(node)?.time.at(-1) ?? 0;
  }

  // An answer of /load, from `since` on.
  add(node, answer) {
    const known = this.nodes.get(node);
    this.nodes.set(node, known ? joined(known, answer) : answer);
  }

  // Machines that are no longer listed have no curves.
  keep(nodes) {
    for (const node of this.nodes.keys()) if (!nodes.includes(node)) this.nodes.delete(node);
  }

  // Title and curves of each chart that has any, of the last so many seconds.
  charts(seconds) {
    const last = Math.max(...[...this.nodes.values()].map((load) => load.time.at(-1) ?? 0));
    return CHARTS.map(([title, values]) => ({ title, traces: this.#traces(values, last - seconds) })).filter(
      (chart) => chart.traces.length,
    );
  }

  #traces(values, since) {
    const several = this.nodes.size > 1;
    return [...this.nodes].flatMap(([node, load], place) => {
      const first = load.time.findIndex((time) => time >= since);
      if (first < 0) return [];
      return values(load).map(([device, column, scale], number) => ({
        ...withGaps(load.time.slice(first), column.slice(first), scale),
        name: device && several ? `${node}/${device}` : device || node,
        // A colour for each machine, or for each device of the only one.
        place: several ? place : number,
        dash: several ? DASHES[number % DASHES.length] : "solid",
      }));
    });
  }
}

// The minutes of an answer in place of those known from its first one on.
function joined(known, answer) {
  if (!answer.time.length) return known;
  const at = known.time.findIndex((time) => time >= answer.time[0]);
  const kept = at < 0 ? known.time.length : at;
  const names = new Set([...Object.keys(known.devices), ...Object.keys(answer.devices)]);
  const join = (one, other) => [...column(one, known).slice(0, kept), ...column(other, answer)];
  const fields = ["cpu_percent", "memory_used_bytes", "disk_free_bytes"];
  return {
    time: [...known.time.slice(0, kept), ...answer.time],
    ...Object.fromEntries(fields.map((field) => [field, join(known[field], answer[field])])),
    devices: Object.fromEntries([...names].map((name) => [name, devices(known.devices[name], answer.devices[name], join)])),
  };
}

function devices(one, other, join) {
  return Object.fromEntries(Object.keys(one ?? other).map((field) => [field, join(one?.[field], other?.[field])]));
}

// Of a device that was not there at that time: nothing.
function column(values, load) {
  return values ?? load.time.map(() => null);
}

// Places and values as plotly takes them. A minute without a report interrupts the line.
function withGaps(times, values, scale) {
  const x = [];
  const y = [];
  times.forEach((time, at) => {
    if (at && time - times[at - 1] > MINUTE) {
      x.push(moment(times[at - 1] + MINUTE));
      y.push(null);
    }
    x.push(moment(time));
    y.push(values[at] === null ? null : values[at] / scale);
  });
  return { x, y };
}

function moment(seconds) {
  return new Date(seconds * 1000).toISOString();
}
