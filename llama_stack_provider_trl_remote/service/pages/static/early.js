// What must not wait for the modules of a page, which run behind plotly: no module, so that it runs before the page is
// shown. A click before them would delete a job without a question, or leave a form that is half filled in.

document.addEventListener("submit", (event) => {
  // Not by their `dataset`: a field of this name hides the form's own.
  const question = (event.submitter ?? event.target).getAttribute("data-question") ?? event.target.getAttribute("data-question");
  if (question && !confirm(question)) event.preventDefault();
});

// What is typed stays, where the address of a preset would begin with an empty form.
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-preset]");
  if (!link) return;
  event.preventDefault();
  const form = document.getElementById("new-job");
  for (const [name, value] of Object.entries(JSON.parse(link.dataset.preset))) form.elements[name].value = value;
  form.dispatchEvent(new Event("input"));
});
