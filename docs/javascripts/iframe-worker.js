// Browsers start no worker for a page that is opened from the disk. Its search runs in a hidden frame.
// (The offline plugin fetches a script from the network for this, unless one of this name is given.)
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.scope.document.createElement("script")
      this.loaded = new Promise(resolve => script.addEventListener("load", resolve))
      script.src = url
      this.scope.document.head.append(script)
    }

    async postMessage(data) {
      await this.loaded
      this.scope.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker
}
