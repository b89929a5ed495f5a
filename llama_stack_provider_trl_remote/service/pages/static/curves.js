// The points of a job's metrics, and what is drawn of them. Without the page.

const DIGITS = 12;

// Exponential moving average, corrected for its beginning: the first value is itself, and equal values stay equal.
export function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return Number((mean / total).toPrecision(DIGITS));
  });
}

const MIDDLE = [0.05, 0.95];
const MARGIN = 0.05;

// The range of an axis for the middle of some values, in powers of ten on a logarithmic one; null: it has no extent.
export function withoutOutliers(values, isLogarithmic) {
  const numbers = values.filter((value) => Number.isFinite(value) && (!isLogarithmic || value > 0));
  const sorted = (isLogarithmic ? numbers.map(Math.log10) : numbers).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const [low, high] = MIDDLE.map((share) => {
    const place = share * (sorted.length - 1);
    const below = sorted[Math.floor(place)];
    return below + (place % 1) * (sorted[Math.ceil(place)] - below);
  });
  const margin = MARGIN * (high - low);
  return high > low ? [low - margin, high + margin] : null;
}

// The range of an axis around values that are all the same, which plotly would draw between 1 less and 1 more; null: they
// differ, or are 0.
export function aroundEqual(values) {
  const numbers = values.filter((value) => Number.isFinite(value));
  const [first] = numbers;
  if (!first || numbers.some((value) => value !== first)) return null;
  return [first - 0.1 * Math.abs(first), first + 0.1 * Math.abs(first)];
}

export class Curves {
  constructor() {
    this.metrics = { train: new Map(), validation: new Map() };
  }

  // Names of its metrics, some of them twice.
  names() {
    return [...this.metrics.train.keys(), ...this.metrics.validation.keys()];
  }

  // The answer of /series, in place of all points.
  replace(series) {
    for (const kind of ["train", "validation"]) this.metrics[kind] = new Map(Object.entries(series[kind]));
  }

  #times() {
    const all = Object.values(this.metrics).flatMap((metrics) => [...metrics.values()]);
    return all.filter((curve) => curve.time.length).map(({ time }) => [time[0], time.at(-1)]);
  }

  // When the job has its first point, in seconds since 1970.
  begin() {
    return Math.min(...this.#times().map(([first]) => first));
  }

  // From its first point to its last one; 0: it has none.
  seconds() {
    const times = this.#times();
    return times.length ? Math.max(...times.map(([, last]) => last)) - this.begin() : 0;
  }

  // One message of the stream. Returns the names of the metrics that have changed.
  add({ event, point, superseded_after: last }) {
    if (last !== undefined) return this.#cut(last);
    if (!point) return [];
    for (const [name, value] of Object.entries(point.metrics)) this.#put(point.kind, name, event, value);
    return Object.keys(point.metrics);
  }

  #cut(step) {
    const changed = [];
    for (const metrics of Object.values(this.metrics)) {
      for (const [name, curve] of metrics) {
        const kept = curve.step.findLastIndex((one) => one <= step) + 1;
        if (kept === curve.step.length) continue;
        for (const column of Object.values(curve)) column.length = kept;
        changed.push(name);
      }
    }
    return changed;
  }

  // Where on the axis a step is: of the nearest point before it, or the first one.
  place(step, axis, unit) {
    const curve = this.metrics.train.get("loss") ?? [...this.metrics.train.values()][0];
    if (axis === "step" || !curve?.step.length) return axis === "step" ? step : null;
    return along(curve, axis, this.begin(), unit)[Math.max(0, curve.step.findLastIndex((one) => one <= step))];
  }

  // The steps between two places of the axis, one point more on each side.
  range(name, axis, from, to, unit) {
    const curve = this.metrics.train.get(name) ?? this.metrics.validation.get(name);
    if (!curve?.step.length) return null;
    if (axis === "step") return [Math.max(0, Math.floor(from)), Math.max(0, Math.ceil(to))];
    const places = axis === "epoch" ? curve.epoch : forward(curve.time);
    const bounds = { epoch: Number, time: seconds, relative: (place) => this.begin() + place * unit?.seconds };
    const [low, high] = [from, to].map(bounds[axis]);
    const first = Math.max(0, places.findLastIndex((place) => place <= low));
    const last = places.findIndex((place) => place >= high);
    return [curve.step[first], last < 0 ? null : curve.step[last]];
  }

  #put(kind, name, event, value) {
    let curve = this.metrics[kind].get(name);
    if (!curve) this.metrics[kind].set(name, (curve = { step: [], epoch: [], time: [], value: [] }));
    // A point may come again after a break: its step has one place.
    const at = curve.step.findLastIndex((one) => one < event.step) + 1;
    const again = curve.step[at] === event.step ? 1 : 0;
    curve.step.splice(at, again, event.step);
    curve.epoch.splice(at, again, event.epoch);
    curve.time.splice(at, again, event.time);
    curve.value.splice(at, again, value);
  }
}

const MEMORY = /^(peak_)?memory_bytes(?:_rank_(\d+))?$/;

// The name of a curve in the legend of its chart: memory by its rank.
export function legendOf(name) {
  const found = MEMORY.exec(name);
  return found ? `rank ${found[2] ?? 0}${found[1] ? ", peak" : ""}` : name;
}

// A place on the axis of times, as plotly names it ("2026-01-31 12:30"), in seconds since the epoch.
function seconds(text) {
  const [day, clock = "00:00"] = String(text).split(/[ T]/);
  return Date.parse(`${day}T${clock.includes(":") ? clock : `${clock}:00`}Z`) / 1000;
}

// Times that never decrease. A clock that was set back, or that of another node, would have the line run backward.
function forward(times) {
  let latest = -Infinity;
  return times.map((time) => (latest = Math.max(latest, time)));
}

// The places of a curve's points on an axis; of time as plotly takes them, and of relative time in units since `begin`.
export function along(curve, axis, begin, unit) {
  if (axis === "relative") return forward(curve.time).map((one) => (one - begin) / unit.seconds);
  if (axis === "time") return forward(curve.time).map((one) => new Date(one * 1000).toISOString());
  return curve[axis];
}

const GROUPS = [
  ["Loss", "Training", (name) => name === "loss" || name === "validation_loss" || name === "eval_loss"],
  ["Reward", "Preference and reward", (name) => /^(eval_)?(reward|reward_std)$/.test(name)],
  ["Rewards", "Preference and reward", (name) => /rewards\/(chosen|rejected|margins)$/.test(name)],
  ["Reward accuracies", "Preference and reward", (name) => name.endsWith("rewards/accuracies")],
  ["Reward functions", "Preference and reward", (name) => /^rewards\/.+\/(mean|std)$/.test(name)],
  ["Log-probabilities", "Preference and reward", (name) => name.includes("logps/")],
  ["Learning rate", "Training", (name) => name === "learning_rate"],
  ["Gradient norm", "Training", (name) => name === "grad_norm"],
  ["Accuracy", "Training", (name) => name.includes("accuracy")],
  ["Entropy", "Training", (name) => name.includes("entropy")],
  ["Tokens per second", "System", (name) => name === "tokens_per_second"],
  ["Memory", "System", (name) => name.includes("memory")],
];
const EXACT = /^(learning_rate|num_tokens|epoch)$|memory/;
const OF_SYSTEM = /seconds|_per_second|runtime|_bytes|mbit|speedup|num_tokens|throughput/;
const OF_REWARDS = /reward|\bkl\b|completions\//;

// Whether a metric is drawn smoothed beside its points: not one that is as exact as a schedule.
export function isNoisy(name) {
  return !EXACT.test(name);
}

// The section of a page that a metric without a group belongs to.
function sectionOf(name) {
  if (OF_SYSTEM.test(name)) return "System";
  if (name.startsWith("eval_")) return "Evaluation";
  return OF_REWARDS.test(name) ? "Preference and reward" : "Training";
}

// Titles of charts, the names of their metrics and their sections; a metric that no group knows has a chart of its own.
export function groups(names) {
  const left = new Set(names);
  const found = [];
  for (const [title, section, belongs] of GROUPS) {
    const members = [...left].filter(belongs);
    for (const name of members) left.delete(name);
    if (members.length) found.push({ title, section, names: members });
  }
  return [...found, ...[...left].sort().map((name) => ({ title: name, section: sectionOf(name), names: [name] }))];
}

// A chart of one metric has the title that the page of a job gives it, as far as that stands for this metric alone.
const TITLES = {
  loss: "Loss", eval_loss: "Eval loss", reward: "Reward", learning_rate: "Learning rate", grad_norm: "Gradient norm",
  mean_token_accuracy: "Accuracy", entropy: "Entropy", tokens_per_second: "Tokens per second",
};
const titleOf = (name) => TITLES[name] ?? (MEMORY.test(name) ? `Memory, ${legendOf(name)}` : name);

const OF_MAIN = ["loss", "eval_loss", "reward", "rewards/margins"];

// The charts of several jobs: one for each metric, those that tell most of any method in a section of their own.
export function separate(names) {
  const found = groups(names).flatMap(({ section, names: members }) => members.map((name) => ({ title: titleOf(name), section, names: [name] })));
  const place = ({ names: [name] }) => OF_MAIN.indexOf(name);
  const main = found.filter((one) => place(one) >= 0).sort((a, b) => place(a) - place(b));
  return [...main.map((group) => ({ ...group, section: "Main" })), ...found.filter((one) => place(one) < 0)];
}

// The charts of a job in the order of its page: the one that tells most of its method first, then the loss; both are
// at the top. Another chart of the method is beside a loss that is first itself.
export function ordered(found, first) {
  const title = found.some((group) => group.title === first) ? first : "Loss";
  const isTop = (group) => group.title === title || group.title === "Loss";
  const top = found.filter(isTop).sort((a, b) => (b.title === title) - (a.title === title));
  return [...top.map((group) => ({ ...group, section: "" })), ...found.filter((group) => !isTop(group))];
}
