// Server-sent events from text that comes in pieces cut anywhere.

/** Give it text as it comes; it gives back the data of each event that is whole. */
export class EventParser {
  #rest = "";
  #data = [];

  feed(text) {
    const events = [];
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?=[^])/);
    // The last line may go on. So may one that ends in a carriage return: its line feed may follow in the next piece.
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line === "data" || line.startsWith("data:")) {
        this.#data.push(line.slice(5).replace(/^ /, ""));
      } // other fields and comments say nothing that a chat needs
    }
    return events;
  }
}
