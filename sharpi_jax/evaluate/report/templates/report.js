"use strict";
// Draws the token view. All texts are untrusted: they become text nodes, never markup.
(() => {
  const view = JSON.parse(document.getElementById("view").textContent);
  const [promptBox, settingBox, text, card, facts] = ["prompt", "setting", "text", "card", "run-facts"].map((id) =>
    document.getElementById(id),
  );
  const KINDS = { C: "certain", A: "argmax", P: "p-min", X: "correction" };
  const NAMES = { C: "Certain", A: "Accepted by argmax", P: "Accepted by p_min", X: "Correction" };
  const VERDICTS = { A: "accepted", P: "accepted (p_min)", R: "rejected", S: "stop: the text ends", "-": "not reached" };
  let shownToken = null;

  function element(name, className, ...children) {
    const node = document.createElement(name);
    if (className) node.className = className;
    node.append(...children);
    return node;
  }
  // Line breaks and tabs are there to be seen, in the text as well as in the card.
  function fill(node, content, breaks) {
    for (const part of content.split(/([\n\t])/)) {
      if (part === "\n" || part === "\t") node.append(part === "\n" ? "↵" : "⇥", breaks ? part : "");
      else node.append(part);
    }
    return node;
  }
  const quoted = (index) => element("code", "", "“", ...fill(element("span"), view.texts[index]).childNodes, "”");
  const chip = (letter, label) => element("span", `token ${KINDS[letter]}`, label);

  function options(box, labels) {
    const before = box.value;
    box.replaceChildren(...labels.map(([value, label]) => Object.assign(element("option", "", label), { value })));
    if (labels.some(([value]) => value === before)) box.value = before;
  }

  function draw() {
    hide();
    const prompt = view.prompts[Number(promptBox.value)];
    options(settingBox, Object.keys(prompt.runs).map((key) => [key, view.settings[Number(key)]]));
    const run = prompt.runs[settingBox.value];
    const before = element("span", "before");
    for (const index of prompt.prompt) fill(before, view.texts[index], true);
    text.replaceChildren(before);
    let count = 0;
    run.steps.forEach(([letters, tokens], number) => {
      const step = element("span", "step");
      [...letters].forEach((letter, index) => {
        if (!(letter in KINDS)) return;
        if (count === run.diverges) step.append(Object.assign(element("span", "leaves"), { title: "leaves greedy’s path" }));
        const token = fill(element("span", `token ${KINDS[letter]}`), view.texts[tokens[index]], true);
        Object.assign(token.dataset, { step: number, index });
        token.setAttribute("role", "button");
        token.setAttribute("aria-describedby", "card");
        token.tabIndex = count === 0 ? 0 : -1;
        count += 1;
        step.append(token);
      });
      text.append(step);
    });
    const leaves = run.diverges === null ? "It is greedy’s text." : `It leaves greedy’s path at token ${run.diverges + 1}.`;
    facts.textContent = `${count} tokens in ${run.steps.length} verify passes; ended by: ${run.finish}. ${leaves}`;
  }

  function row(step, index) {
    const [letters, tokens, probabilities, choices] = step;
    const letter = letters[index];
    const verdict = letter in KINDS ? chip(letter, VERDICTS[letter]) : VERDICTS[letter];
    // After a rejection the trunk read a draft that is not in the text: what it chose there says nothing.
    const choice = choices.length && letter !== "-" ? quoted(choices[index - 1]) : "–";
    const cells = [quoted(tokens[index]), probabilities[index - 1].toFixed(4), verdict, choice];
    return element("tr", "", ...cells.map((cell) => element("td", "", cell)));
  }

  function describe(run, number, index) {
    const step = run.steps[number];
    const [letters, tokens, probabilities, choices] = step;
    const letter = letters[index];
    const head = element("p", "", chip(letter, NAMES[letter]), " ", quoted(tokens[index]));
    const parts = [head];
    if (letter === "X") {
      const [old, drafts, chances] = run.steps[number - 1];
      const at = old.indexOf("R");
      parts.push(element("p", "", "In place of the draft ", quoted(drafts[at]), `, to which the trunk gave ${chances[at - 1].toFixed(4)}.`));
    }
    if (index > 0) parts.push(element("p", "", `The trunk’s probability: ${probabilities[index - 1].toFixed(4)}`));
    const choice = index > 0 ? choices[index - 1] : tokens[0];
    if (choice !== undefined) parts.push(element("p", "", "Greedy would have chosen ", quoted(choice), choice === tokens[index] ? ", too." : "."));
    if (tokens.length > 1) {
      const heads = ["draft", "p", "verdict", "greedy"].map((name) => element("th", "", name));
      const table = element("table", "", element("thead", "", element("tr", "", ...heads)));
      const body = element("tbody");
      for (let i = 1; i < tokens.length; i += 1) {
        const line = row(step, i);
        if (i === index) line.className = "here";
        body.append(line);
      }
      table.append(body);
      parts.push(table);
    } else parts.push(element("p", "", "This step had no drafts."));
    return parts;
  }

  function show(token) {
    if (token === shownToken) return;
    hide();
    shownToken = token;
    token.classList.add("shown");
    const run = view.prompts[Number(promptBox.value)].runs[settingBox.value];
    card.replaceChildren(...describe(run, Number(token.dataset.step), Number(token.dataset.index)));
    card.hidden = false;
    const boxes = token.getClientRects();
    const at = boxes[boxes.length - 1];
    const left = Math.max(12, Math.min(at.left, document.documentElement.clientWidth - card.offsetWidth - 12));
    const below = at.bottom + 8 + card.offsetHeight <= window.innerHeight || at.top < card.offsetHeight + 8;
    card.style.left = `${left + window.scrollX}px`;
    card.style.top = `${(below ? at.bottom + 8 : at.top - card.offsetHeight - 8) + window.scrollY}px`;
  }
  function hide() {
    if (shownToken) shownToken.classList.remove("shown");
    shownToken = null;
    card.hidden = true;
  }
  const tokenAt = (event) => event.target.closest("#text .token");

  text.addEventListener("pointerover", (event) => {
    const token = tokenAt(event);
    if (token) show(token);
  });
  text.addEventListener("pointerleave", hide);
  text.addEventListener("click", (event) => {
    const token = tokenAt(event);
    if (token) {
      move(token);
      show(token);
    } else hide();
  });
  text.addEventListener("focusin", (event) => {
    const token = tokenAt(event);
    if (token) show(token);
  });
  text.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });
  // One stop of the Tab key for the whole text; arrows move inside it.
  function move(token) {
    for (const other of text.querySelectorAll('.token[tabindex="0"]')) other.tabIndex = -1;
    token.tabIndex = 0;
    token.scrollIntoView({ block: "nearest" });
    token.focus({ preventScroll: true });
  }
  text.addEventListener("keydown", (event) => {
    const tokens = [...text.querySelectorAll(".token")];
    const at = tokens.indexOf(document.activeElement);
    const targets = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: tokens.length - 1 };
    const target = tokens[targets[event.key]];
    if (at < 0 || !target) return;
    event.preventDefault();
    move(target);
  });

  promptBox.addEventListener("change", draw);
  settingBox.addEventListener("change", draw);
  if (!view.prompts.length) {
    facts.textContent = "There are no runs to show.";
    return;
  }
  options(promptBox, view.prompts.map((prompt, index) => [String(index), `${prompt.id} (${prompt.domain})`]));
  options(settingBox, Object.keys(view.prompts[0].runs).map((key) => [key, view.settings[Number(key)]]));
  if (String(view.start) in view.prompts[0].runs) settingBox.value = String(view.start);
  draw();
})();
