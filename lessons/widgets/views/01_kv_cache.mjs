// Above: what each step computes and what it reads back. Below: one GPU's memory, filled by weights and then by keys and values.

export function steps(trace) {
  return Math.max(1, trace.forwards.length);
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, number, numbers, legend, count } = kit;
  const { params: p, forwards, reused, cache_bytes, weight_bytes, usable_bytes, oom_step, bytes_per_token } = trace;
  const fits = weight_bytes <= usable_bytes, done = Math.min(index + 1, forwards.length), total = p.new_tokens, gib = (bytes, digits = 1) => `${number(bytes / 2 ** 30, digits)} GiB`;
  const high = 150, top = 22, base = top + high, px = kit.width / total;
  const most = Math.max(1, ...forwards.map((n, i) => n + reused[i])), py = high / most, shapes = [];

  // What is computed lies on what is read back; steps yet to come are faint.
  const area = (from, to, low, up, css) => {
    if (from >= to) return null;
    let over = "", back = "";
    for (let i = from; i < to; i++) {
      const [x0, x1] = [(i * px).toFixed(2), ((i + 1) * px - (px > 6 ? 1 : 0)).toFixed(2)];
      over += `L${x0} ${(base - up(i) * py).toFixed(1)}H${x1}`;
      back = `L${x1} ${(base - low(i) * py).toFixed(1)}H${x0}${back}`;
    }
    return path(`M${over.slice(1)}${back}Z`, `area ${css}`);
  };
  const read = (i) => (p.cache ? reused[i] : 0), all = (i) => read(i) + Math.max(forwards[i], 2.5 / py);
  for (const [from, to, css] of [[0, done, ""], [done, forwards.length, " faint"]]) {
    shapes.push(area(from, to, () => 0, read, `blue${css}`), area(from, to, read, all, `orange${css}`));
  }
  shapes.push(line(0, base, kit.width, base, "ink"), text(0, 12, `tokens in a step, up to ${number(most)}`, "small soft"));
  shapes.push(text(0, base + 16, "step 0", "small soft"), text(kit.width, base + 16, `step ${number(total - 1)}`, "small soft end"));
  if (!fits) shapes.push(rect(0, top, kit.width, high, "hatch red"), text(kit.width / 2, top + high / 2, "no step runs: the weights do not fit", "red bold halo middle"));
  else if (oom_step !== null) {
    const x = Math.min(kit.width, oom_step * px);
    shapes.push(rect(x, top, kit.width - x, high, "hatch red"), line(x, top, x, base, "red thick"), text(x > kit.width / 2 ? x - 8 : x + 8, base - 12, `out of memory at step ${number(oom_step)}`, `red bold halo${x > kit.width / 2 ? " end" : ""}`));
  }

  // Memory: everything that the GPU has, what of it is usable, weights, cache.
  const gpu = p.gpu_gib * 2 ** 30, span = Math.max(gpu, weight_bytes), mx = kit.width / span, y = base + 52, held = done ? cache_bytes[done - 1] : 0;
  shapes.push(text(0, y - 8, `memory of a GPU with ${p.gpu_gib} GiB`, "small soft"));
  shapes.push(rect(0, y, gpu * mx, 30, "free"), rect(usable_bytes * mx, y, (gpu - usable_bytes) * mx, 30, "hatch grey"));
  shapes.push(rect(0, y, weight_bytes * mx, 30, `box ${weight_bytes > usable_bytes ? "red" : "grey"}`), rect(weight_bytes * mx, y, held * mx, 30, "orange"));
  shapes.push(line(usable_bytes * mx, y - 4, usable_bytes * mx, y + 34, "ink"));
  if (!fits) shapes.push(rect(usable_bytes * mx, y, (weight_bytes - usable_bytes) * mx, 30, "hatch red"));  // what is missing
  if (weight_bytes * mx > 110) shapes.push(text(8, y + 19, `weights ${gib(weight_bytes)}`, "small"));
  if (usable_bytes * mx > 110) shapes.push(text(0, y + 48, "0", "small soft"));
  shapes.push(text(Math.max(88, usable_bytes * mx), y + 48, `usable ${gib(usable_bytes)}`, "small soft end"));

  const last = index === steps(trace) - 1, computed = forwards.slice(0, done).reduce((a, b) => a + b, 0);
  let says = fits ? `Step ${number(index)} runs ${count(forwards[index] ?? 0, "token")} through the model${p.cache ? ` and reads ${number(reused[index] ?? 0)} from the cache` : index ? ", all but the newest once more" : ", the whole prompt"}.` : `The weights alone do not fit: ${gib(weight_bytes - usable_bytes)} are missing.`;
  if (last && fits && oom_step !== null) says += ` The next step finds no room: ${gib(held)} of keys and values beside ${gib(weight_bytes)} of weights.`;
  if (p.cache && p.restart_positions) says += " Positions restart at 0 in every step: the first token is right, and then the text goes wrong.";
  return {
    picture: [
      svg(kit.width, y + 54, `${done} of ${total} steps: ${number(computed)} token-forwards, ${gib(held)} of cache.`, ...shapes),
      legend(["orange", "computed in this step, and the cache that keeps it"], ...(p.cache ? [["blue", "read from the cache"]] : []), ["grey", "weights"], fits ? ["grey hatched", "not usable"] : ["red hatched", "weights that find no room"]),
      numbers([number(computed), "token-forwards so far"], [gib(held, 2), "of keys and values"], [`${number(bytes_per_token / 1024, bytes_per_token % 1024 ? 1 : 0)} KiB`, "per token"], ...(oom_step === null ? [] : [[fits ? `step ${number(oom_step)}` : "at once", "out of memory", "red"]])),
      ...(fits ? [kit.html("p", { class: "written" }, kit.html("span", {}, "SmolLM2 continues: "), kit.html("q", {}, trace.text.slice(0, Math.max(1, Math.ceil((trace.text.length * done) / Math.max(1, total)))).join("")))] : []),
    ],
    text: says,
  };
}
