// The list of nodes as it changes.
import { Parts } from "./parts.js";

const live = document.getElementById("live");
const parts = new Parts(["nodes"], {
  replaced: () => (live.textContent = ""),
  failed: () => (live.textContent = "The service does not answer; trying again."),
});
parts.every(5000);
