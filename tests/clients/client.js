// A client of `elastable serve` in another language, written from proto/ alone: node client.js HOST:PORT PROTO_FOLDER
// Creates a table, looks rows up, pushes a gradient twice, is refused twice; prints one line of JSON. What it must send: a server
// with tokens asks for `authorization: Bearer TOKEN` with each call. A worker of a job shows elastable-session-bin, too, at its
// master and with PushRows at its store servers (docs/extending.md); a parameter server, as here, asks for no session.
const grpc = require("@grpc/grpc-js"), loader = require("@grpc/proto-loader");

const [address, folder] = process.argv.slice(2);
const said = { includeDirs: [folder], keepCase: true, longs: String, enums: String, defaults: true };
const file = loader.loadSync(["elastable/embedding_store/v1/store.proto"], said);
const { Store } = grpc.loadPackageDefinition(file).elastable.embedding_store.v1;
const store = new Store(address, grpc.credentials.createInsecure());
const DIM = 4;

const bytesOf = (ids, values = []) => {
  const body = Buffer.alloc(8 * ids.length + 4 * values.length);
  ids.forEach((id, i) => body.writeBigInt64LE(BigInt(id), 8 * i));
  values.forEach((value, i) => body.writeFloatLE(value, 8 * ids.length + 4 * i));
  return body;
};
const unary = (call, request) => new Promise((done, failed) =>
  store[call](request, (error, reply) => error ? failed(error) : done(reply)));
const lookup = ids => new Promise((done, failed) => {
  const call = store.Lookup(), bodies = [];
  call.on("data", frame => bodies.push(frame.body));
  call.on("error", failed);
  call.on("end", () => {
    const body = Buffer.concat(bodies);
    done(Array.from({ length: body.length / 4 }, (_, i) => body.readFloatLE(4 * i)));
  });
  call.write({ header: { tables: [{ table: "users", count: ids.length }] }, body: bytesOf(ids) });
  call.end();
});
const push = (number, ids, values) => new Promise((done, failed) => {
  const call = store.PushRows((error, reply) => error ? failed(error) : done(reply));
  const parts = [{ slices: [{ table: "users", count: ids.length, dim: DIM }] }];
  call.write({ header: { sender: "a client", micro_batch: number, parts }, body: bytesOf(ids, values) });
  call.end();
});
const refusal = made => made.then(() => "none", error => `${grpc.status[error.code]}: ${error.details}`);

(async () => {
  const initializer = { kind: "uniform", a: -0.05, b: 0.05 };
  const optimizer = { name: "adam", hyperparameters: { learning_rate: 0.1 } };
  const { created } = await unary("CreateTable", { spec: { name: "users", dim: DIM, initializer, optimizer } });
  const ids = [1, 2, 9007199254740993n], before = await lookup(ids);
  const ones = Array(12).fill(1), pushed = [await push(1, [1, 1, 2], ones), await push(1, [1, 1, 2], ones)];
  const after = await lookup(ids), many = (await lookup(Array.from({ length: 200_000 }, (_, i) => i))).length;
  const refused = [await refusal(push(2, [1], [NaN, 0, 0, 0])), await refusal(push(3, [1], [1, 2, 3]))];
  console.log(JSON.stringify({ created, before, pushed, after, many, refused }));
  process.exit(0);
})().catch(error => { console.error(error.code, error.details || error); process.exit(1); });
