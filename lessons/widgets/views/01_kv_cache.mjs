// Above: two staircases on one clock, tokens written against time. In the middle: the pass that each run is in. Below: the memory.

export function steps(trace) {
  return trace.clock.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, circle, key, number, numbers, legend, params: p } = kit;
  const { bytes_per_token, weight_bytes, usable_bytes, gpu_bytes, oom_step } = trace;
  const [now, fast, few, slow, many] = trace.clock[index], end = Math.max(1, trace.clock.at(-1)[0]), total = p.new_tokens, last = index === trace.clock.length - 1;
  const full = oom_step !== null && last, gib = (bytes, digits = 1) => `${number(bytes / 2 ** 30, digits)} GiB`;
  const seconds = (us) => (end < 1e6 ? `${number(us / 1000)} ms` : `${number(us / 1e6, 1)} s`);
  const top = 18, high = kit.width < 560 ? 104 : 150, base = top + high, px = kit.width / end, py = high / total, shapes = [];

  /** The steps that a run has done: a stair for each, as wide as it took. */
  const stairs = ({ us }, done, css) => {
    let [at, d] = [0, `M0 ${base}`];
    for (let i = 0; i < done; i++) {
      at += us[i];
      d += `H${(at * px).toFixed(1)}V${(base - (i + 1) * py).toFixed(1)}`;
    }
    shapes.push(path(`${d}H${(Math.max(at, done === us.length ? at : now) * px).toFixed(1)}`, `${css} thick`));
    return [done === us.length ? at : now, base - done * py];
  };
  shapes.push(rect(0, top, kit.width, high, "free"), text(0, 11, `tokens written, of ${number(total)}`, "small soft"));
  if (full) shapes.push(rect(0, top, kit.width, (total - fast) * py, "hatch red"));
  for (const [name, run, done, css] of [["without", trace.without, slow, "orange"], ["with", trace.with, fast, "blue"]]) {
    const [at, y] = stairs(run, done, css);
    shapes.push(key(name, circle(Math.min(kit.width - 4, at * px), y, 5, css)));
  }
  if (full) shapes.push(text(kit.width / 2, top + Math.max(16, (total - fast) * py - 8), `out of memory at step ${number(oom_step)}`, "red bold halo middle small"));
  shapes.push(line(0, base, kit.width, base, "ink"), text(0, base + 14, "0", "small soft"), text(kit.width, base + 14, seconds(end), "small soft end"));

  // The pass that each run is in: what it computes, and what it reads instead.
  const all = p.batch * (p.prompt + total), tx = kit.width / all;
  [["with a cache", fast, trace.with], ["without a cache", slow, trace.without]].forEach(([name, done, { forwards }], i) => {
    const y = base + 36 + i * 36, at = Math.min(done, forwards.length - 1), computed = forwards[at] ?? 0, read = i === 0 && at > 0 ? p.batch * (p.prompt + at - 1) : 0;
    const state = done >= forwards.length ? (i === 0 && oom_step !== null ? "stopped" : "done") : `step ${number(done)}`;
    shapes.push(text(0, y - 5, `${name}, ${state}: computes ${number(computed)}${i === 0 ? `, reads ${number(read)}` : " and reads none"}`, "small"));
    shapes.push(rect(0, y, kit.width, 14, "free"), key(`read ${i}`, rect(0, y, read * tx, 14, "green")), key(`computed ${i}`, rect(read * tx, y, Math.max(2, computed * tx), 14, i === 0 && at > 0 ? "blue" : "orange")));
  });

  // Memory: all that the GPU has, what of it is usable, weights, cache.
  const y = base + 116, mx = kit.width / gpu_bytes, held = trace.cache_bytes[index], next = `cache ${gib(held, 2)}`;
  shapes.push(text(0, y - 6, `memory of an ${p.gpu}: weights ${gib(weight_bytes)}, ${next}`, `small${full ? " red" : ""}`));
  shapes.push(rect(0, y, kit.width, 18, "free"), rect(usable_bytes * mx, y, (gpu_bytes - usable_bytes) * mx, 18, "hatch grey"), rect(0, y, weight_bytes * mx, 18, "grey"));
  shapes.push(key("cache", rect(weight_bytes * mx, y, Math.max(held > 0 ? 2 : 0, held * mx), 18, full ? "red" : "green")), line(usable_bytes * mx, y - 3, usable_bytes * mx, y + 21, "ink"));

  const written = trace.text.slice(0, Math.ceil((trace.text.length * fast) / total)).join("");
  return {
    picture: [
      svg(kit.width, y + 24, `After ${seconds(now)}: ${fast} of ${total} tokens with a cache, ${slow} without one.`, ...shapes),
      legend(["blue", "with a cache"], ["orange", "without one"], ["green", "kept: read, not computed again"], ["grey", "weights"], ["grey hatched", "not usable"]),
      numbers([seconds(now), "on the clock"], [number(few), "token-forwards with"], [number(many), "token-forwards without"], ...(last && trace.times ? [[`${trace.times} ×`, "as fast"]] : [])),
      kit.html("p", { class: "written" }, kit.html("span", {}, "SmolLM2 writes: "), kit.html("q", {}, written)),
    ],
    text: full ? `Out of memory at step ${number(oom_step)}: ${gib(weight_bytes)} of weights and ${gib(held)} of keys and values fill what is usable.`
      : p.restart_positions && fast > 1 ? "Positions restart at 0 in every step: the first token is right, and then the text goes wrong."
        : `After ${seconds(now)}, ${number(fast)} of ${number(total)} tokens are written with a cache, and ${number(slow)} without one.`,
  };
}
