// Values as texts, the same as the service renders them (rendering.py): an update changes no unit and no form.

// A number with five digits, as Python's format `.5g`.
export function number(value, precision = 5) {
  if (!Number.isFinite(value)) return "";
  const size = Math.abs(value);
  const [digits, exponent] = (size && size < 1e-4 ? value.toExponential(precision - 1) : value.toPrecision(precision)).split("e");
  const short = digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits;
  return exponent ? `${short}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}` : short;
}

// Bytes as KiB, MiB, GiB or TiB.
export function size(value) {
  let left = value;
  for (const unit of ["bytes", "KiB", "MiB", "GiB"]) {
    if (left < 1024) return `${left.toFixed(unit === "bytes" ? 0 : 1)} ${unit}`;
    left /= 1024;
  }
  return `${left.toFixed(1)} TiB`;
}

// Seconds as hours, minutes and seconds, without leading zeros; empty: not known.
export function duration(exact) {
  if (exact === undefined) return "";
  const seconds = Math.round(exact);
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${seconds % 60} s` : `${seconds} s`;
}

// A number with four digits, for a narrow column (list_view.py).
export function short(value) {
  return number(value, 4);
}

// A number of steps, for a narrow column: in thousands from 10,000 on, rounded down (list_view.py).
export function count(steps) {
  return steps >= 10_000 ? `${Math.floor(steps / 100) / 10}k` : String(steps);
}

// Seconds in at most two units, for a narrow column (list_view.py).
export function brief(exact) {
  const seconds = Math.round(exact);
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  const two = (value) => String(value).padStart(2, "0");
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours) return `${hours} h ${two(minutes)}`;
  return minutes ? `${minutes}:${two(seconds % 60)} min` : `${seconds} s`;
}

// Seconds of an optimizer step, in ms where they are short; empty: not known.
export function stepTime(seconds) {
  if (!Number.isFinite(seconds)) return "";
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  return seconds < 60 ? `${seconds.toFixed(2)} s` : duration(seconds);
}

// The name of a curve as text: plotly has it with two characters of HTML escaped.
export function legendText(name) {
  return name.replaceAll("&lt;", "<").replaceAll("&amp;", "&");
}
