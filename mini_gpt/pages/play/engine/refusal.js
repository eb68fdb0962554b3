// A request that can't be answered. The message is for the reader of the page.
export class Refusal extends Error {}
