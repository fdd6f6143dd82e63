// The run's history as columns that grow at their ends.

const GROUPS = [
  ["step", "loss", "tokens_per_s"],
  ["held_out_step", "held_out_loss"],
  ["view_step"],
];

export function emptyHistory() {
  return Object.fromEntries(GROUPS.flat().map((name) => [name, []]));
}

/** The history with what is new; from row 0 on, what was there is replaced. */
export function appendHistory(history, grown) {
  const result = {};
  for (const group of GROUPS) {
    const from = grown[`${group[0]}_from`];
    for (const name of group) result[name] = history[name].slice(0, from).concat(grown[name]);
  }
  return result;
}

/** Exponential moving average; about the last `span` values count. */
export function smoothed(values, span) {
  const weight = 2 / (span + 1);
  let mean = null;
  return values.map((value) => {
    if (value === null) return mean;
    mean = mean === null ? value : mean + weight * (value - mean);
    return mean;
  });
}
