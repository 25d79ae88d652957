// One picture: a decode step at each stage, as a bar of three parts. Hatched: what the stage saved; red: what it made longer.

export function steps(trace) {
  return trace.stages.length;
}

const COLORS = { products: "blue", attention: "purple", operations: "orange" };

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, key, numbers, legend, number, before: ghost } = kit;
  const { stages, floor_us, read_us, layers } = trace, now = stages[index], before = stages[index - 1] ?? now;
  const narrow = kit.width < 560, left = narrow ? 0 : 182, shapes = [], labels = [], last = index === stages.length - 1;
  const scale = (kit.width - left - 64) / Math.max(...stages.map(({ total_us }) => total_us));
  const ms = (us) => number(us / 1000, us < 1e3 ? 2 : 1);
  const top = narrow ? 36 : 26, pitch = narrow ? 42 : 37, thick = narrow ? 20 : 24;

  stages.forEach((stage, i) => {
    const y = top + i * pitch, was = stages[i - 1] ?? stage, here = i === index;
    const css = `small halo ${here ? "bold" : i <= index ? "" : "soft"}`;
    labels.push(narrow ? text(0, y - 5, stage.name, `${css} halo`) : text(left - 10, y + thick / 2 + 4, stage.name, `${css} end`));
    if (i > index) return shapes.push(rect(left, y, 2, thick, "free"));
    let x = left;
    for (const [part, us] of Object.entries(stage.parts_us)) {
      const wide = us * scale, slower = us > was.parts_us[part];
      // The bar of this stage is the one that moved down from the stage before.
      shapes.push(key(here ? `now ${part}` : `${part} ${i}`, box(x, y, wide, thick, wide > 36 ? ms(us) : "", here || !slower ? COLORS[part] : "red", `${part}: ${ms(us)} ms`)));
      if (slower) shapes.push(rect(x + was.parts_us[part] * scale, y, Math.max(2, (us - was.parts_us[part]) * scale), thick, "red"));
      x += wide;
    }
    const saved = (was.total_us - stage.total_us) * scale, longer = stage.total_us > was.total_us;
    if (here && saved > 0) shapes.push(key("saved", rect(x, y, saved, thick, "hatch green")));
    const inside = x + Math.max(0, here ? saved : 0) + 62 > kit.width;
    labels.push(text(inside ? kit.width : x + (here ? Math.max(0, saved) : 0) + 6, y + thick / 2 + 4, `${ms(stage.total_us)} ms`, `small halo${inside ? " end" : ""}${here ? " bold" : ""}${longer ? " red" : ""}`));
  });
  const bottom = top + (stages.length - 1) * pitch + thick, floor = left + floor_us * scale;
  shapes.push(line(floor, top - 8, floor, bottom + 6, "ink dashed"));
  shapes.push(text(Math.max(0, Math.min(floor - 4, kit.width - 190)), 11, `the floor: products alone, ${ms(floor_us)} ms`, "small"), ...labels);

  const fewer = before.operations - now.operations, gain = before.total_us / now.total_us, reads = now.bound === "memory";
  const did = [
    `Attention fetches one sequence after another: ${number(now.per_sequence * trace.params.batch * layers)} of the ${number(now.operations)} operations are there for that.`,
    `All sequences attend at once: ${number(fewer)} operations fewer.`,
    `q, k and v are one product, gate and up another: ${before.per_layer - now.per_layer} operations a layer fewer.`,
    `Block tables and positions stay from step to step: ${fewer} operations fewer in ${number(before.operations)}.`,
    now.multiply_us === before.multiply_us ? "The GPU's library reads the weights as they lie: there is nothing to pack."
      : `The same weights in another order. Multiplying takes ${ms(now.multiply_us)} instead of ${ms(before.multiply_us)} ms${reads ? `, but reading them takes ${ms(read_us)}` : ""}.`,
    `Keys and values are read where they lie: a third of the bytes, and ${-fewer} operations more.`,
  ][index];
  const effect = index === 0 ? "" : now.total_us > before.total_us ? ` The step is longer: ${number(now.total_us - before.total_us)} µs more.`
    : gain < 1.005 ? " The step is hardly shorter." : ` The step is ${number(gain, 2)} times as fast.`;
  const so_far = stages[0].total_us / now.total_us, little = last && so_far < 1.2;
  return {
    picture: [
      svg(kit.width, bottom + 10, `${now.name}: ${ms(now.total_us)} ms a step, of which the products are ${ms(now.parts_us.products)}.`, ...shapes),
      legend(["blue", "products"], ["purple", "attention: keys and values moved"], ["orange", "operations, until they begin"], ["green hatched", "saved by this stage"], ["red", "longer than before"]),
      numbers([number(now.tokens_per_second), "tokens/s"], [`${number(so_far, 2)} ×`, "as fast as the first stage", little ? "red" : ""], [`${number(100 * now.share_of_floor, now.share_of_floor < 0.1 ? 1 : 0)} %`, "of what the products allow", now.share_of_floor < 0.1 ? "red" : ""], [number(now.operations), "operations a step"]),
    ],
    text: did + effect + (last && ghost ? ` All stages together gain ${number(so_far, 2)} ×; before it was ${number(ghost.trace.gain, 2)} ×.` : ""),
  };
}
