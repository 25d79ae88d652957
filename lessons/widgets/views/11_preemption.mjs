// The pool over time, by owner. Red marks above: somebody was preempted. Red bars below: tokens computed once more.

export function steps(trace) {
  return trace.refused ? 1 : trace.steps.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, numbers, legend, number, count, color, html } = kit, p = trace.params;
  if (trace.refused) {
    return {
      picture: [html("p", { class: "refused" }, html("b", {}, "Refused on arrival. "), trace.refused), numbers([p.pool_blocks, "blocks in the pool"], [Math.ceil((p.prompt + p.output - 1) / p.block_size), "needed by one request", "red"])],
      text: `Nobody runs: ${trace.refused}.`,
    };
  }
  const { steps: all } = trace, done = index + 1, px = kit.width / all.length, shapes = [];
  const top = 30, high = 170, base = top + high, py = high / p.pool_blocks;
  const every = Math.max(1, Math.floor((1.2 * all.length) / kit.width)), columns = []; // as many as there are pixels for
  for (let i = 0; i < done; i += every) columns.push(i);

  shapes.push(rect(0, top, kit.width, high, "free"));
  const floor = columns.map(() => 0), names = [...new Set(all.flatMap((step) => Object.keys(step.held)))].map(Number);
  for (const owner of names) {
    const blocks = columns.map((i) => all[i].held[owner] ?? 0);
    for (let a = 0; a < columns.length; ) { // one shape for each stay in the pool
      if (!blocks[a]) { a += 1; continue; }
      let b = a, over = "", back = "";
      for (; b < columns.length && blocks[b]; b++) {
        const x0 = (columns[b] * px).toFixed(1), x1 = (Math.min(done, columns[b] + every) * px).toFixed(1);
        over += `L${x0} ${(base - (floor[b] + blocks[b]) * py).toFixed(1)}H${x1}`;
        back = `L${x1} ${(base - floor[b] * py).toFixed(1)}H${x0}${back}`;
        floor[b] += blocks[b];
      }
      const shape = path(`M${over.slice(1)}${back}Z`, `area owner ${color(owner)}`);
      shape.append(kit.shape("title", {}, `request ${owner}`));
      shapes.push(shape);
      a = b;
    }
  }
  let preemptions = 0, redone = 0;
  const worst = Math.max(1, ...all.map((step) => step.redone)), again = base + 62;
  all.slice(0, done).forEach((step, i) => {
    preemptions += step.preempted.length;
    redone += step.redone;
    if (step.preempted.length) shapes.push(path(`M${i * px} ${top - 3}l-3.5 -8h7z`, "area red"));
    if (step.redone) shapes.push(rect(i * px, again - (step.redone / worst) * 34, Math.max(1.5, px), (step.redone / worst) * 34, "red"));
  });
  shapes.push(text(0, 12, `${p.pool_blocks} blocks, by owner`, "small soft"), text(kit.width, 12, "▾ preempted", "small red end"), line(0, base, kit.width, base, "ink"));
  shapes.push(text(0, base + 18, `tokens computed once more in a step, up to ${worst === 1 && !trace.redone ? 0 : number(worst)}`, "small soft"), line(0, again, kit.width, again, "ink"));
  shapes.push(text(0, again + 16, "step 0", "small soft"), text(kit.width, again + 16, `step ${number(all.length - 1)}`, "small soft end"));
  if (done < all.length) shapes.push(line(done * px, top, done * px, again, "accent thick"));

  const step = all[index], last = done === all.length, held = Object.entries(step.held).map(([owner, n]) => `${n} by request ${owner}`).join(", ");
  const victims = step.preempted.map((r) => `request ${r}`).join(" and ");
  return {
    picture: [
      svg(kit.width, again + 20, `Pool of ${p.pool_blocks} blocks over ${done} of ${all.length} steps; ${preemptions} preemptions, ${redone} tokens computed again.`, ...shapes),
      legend(["blue", "blocks of a request"], ["free", "free"], ["red", "a preemption, and the work it costs"]),
      numbers([number(preemptions), preemptions === 1 ? "preemption" : "preemptions", preemptions ? "red" : ""], [number(redone), "tokens computed again", redone ? "red" : ""], [step.free, "blocks free"], [step.waiting.length, "waiting"], [number(done), last ? "steps, all done" : "steps so far"],
        ...(p.policy === "swap" ? [[number(trace.copied_blocks), "blocks copied in all"]] : [])),
    ],
    text: last ? `All ${p.requests} requests are done after ${number(all.length)} steps: ${count(trace.preemptions, "preemption")}, ${number(trace.useful)} tokens of useful work, ${number(trace.redone)} computed again.`
      : victims ? `Step ${step.step}: no block is free, so ${victims}, the last to come, ${step.preempted.length > 1 ? "have" : "has"} to go. Blocks held: ${held}.`
        : `Step ${step.step}. Blocks held: ${held || "none"}; ${step.free} free. ${step.waiting.length} waiting.`,
  };
}
