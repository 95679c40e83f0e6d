// node-llama-cpp as a process: the protocol of _peer_worker.py. Run in the directory that holds node_modules.
//
//     node scripts/_peer_worker.mjs THREADS CONTEXT TARGET [DRAFT LEAST_DRAFTED]

import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";
import {createInterface} from "node:readline";

// An import would look beside this file, and the package is where it was installed.
const require = createRequire(process.cwd() + "/");
const library = await import(pathToFileURL(require.resolve("node-llama-cpp")).href);

const [threadsText, contextText, target, draft, leastDrafted] = process.argv.slice(2);
const threads = Number(threadsText), contextSize = Number(contextText);

const llama = await library.getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: "error"});

async function sequenceOf(modelPath, options) {
    const model = await llama.loadModel({modelPath});
    const context = await model.createContext({contextSize, threads: {ideal: threads, min: threads}});
    return [model, context.getSequence(options)];
}

let tokenPredictor, draftSequence;
if (draft != null) {
    [, draftSequence] = await sequenceOf(draft);
    tokenPredictor = new library.DraftSequenceTokenPredictor(draftSequence, {minTokens: Number(leastDrafted)});
}
const [model, sequence] = await sequenceOf(target, {tokenPredictor});

function say(fields) {
    process.stdout.write(JSON.stringify(fields) + "\n");
}

say({ready: true});
for await (const line of createInterface({input: process.stdin})) {
    const job = JSON.parse(line);
    await sequence.clearHistory();
    await draftSequence?.clearHistory();
    const before = sequence.tokenPredictions.used;
    const options = {
        temperature: job.temperature, topK: job.top_k, topP: job.top_p, minP: job.min_p, seed: job.seed,
        yieldEogToken: true
    };
    let count = 0;
    for await (const token of sequence.evaluate(job.prompt, options)) {
        say({token: Number(token)});
        if (++count >= job.max_tokens || model.isEogToken(token)) break;
    }
    say({done: true, steps: count - (sequence.tokenPredictions.used - before)});
}
process.exit(0);
