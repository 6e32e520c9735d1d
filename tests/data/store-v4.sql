BEGIN TRANSACTION;
CREATE TABLE outcomes (
	outcome_id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	saved_at FLOAT NOT NULL, 
	outcome TEXT NOT NULL, 
	PRIMARY KEY (outcome_id), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
CREATE TABLE phases (
	row_id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	session_id INTEGER NOT NULL, 
	phase TEXT NOT NULL, 
	start FLOAT NOT NULL, 
	"end" FLOAT NOT NULL, 
	core_busy_secs TEXT NOT NULL, 
	PRIMARY KEY (row_id), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
CREATE TABLE proofs (
	proof_id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	slice_id TEXT NOT NULL, 
	proved_at FLOAT NOT NULL, 
	proof TEXT NOT NULL, 
	PRIMARY KEY (proof_id), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
CREATE TABLE runs (
	run_id INTEGER NOT NULL, 
	identity TEXT NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (run_id), 
	UNIQUE (identity)
);
INSERT INTO "runs" VALUES(1,'0123456789abcdef0123456789abcdef',0.0);
CREATE TABLE schema_version (
	version INTEGER NOT NULL
);
INSERT INTO "schema_version" VALUES(4);
CREATE TABLE sessions (
	session_id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	opened_at FLOAT NOT NULL, 
	pid INTEGER NOT NULL, 
	facts TEXT NOT NULL, 
	PRIMARY KEY (session_id), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO "sessions" VALUES(1,1,1,100.0,19252,'{"model": {"name": "net", "digest": "dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd"}, "target": {"kind": "llvm", "json": "{\"kind\":\"llvm\",\"mcpu\":\"znver3\"}"}, "device": "CPU X", "slice_kind": "cpu", "pct": 50, "tvm_version": "0.27.0", "tunerd_version": "0.1.0", "settings": {}, "host": {}}');
INSERT INTO "sessions" VALUES(2,1,2,200.0,19252,'{"model": {"name": "net", "digest": "dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd"}, "target": {"kind": "llvm", "json": "{\"kind\":\"llvm\",\"mcpu\":\"znver3\"}"}, "device": "CPU X", "slice_kind": "cpu", "pct": 50, "tvm_version": "0.27.0", "tunerd_version": "0.1.0", "settings": {}, "host": {}}');
CREATE TABLE setbacks (
	setback_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	slice_id TEXT, 
	at FLOAT NOT NULL, 
	stage TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	message TEXT NOT NULL, 
	PRIMARY KEY (setback_id), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE slices (
	run_id INTEGER NOT NULL, 
	slice_id TEXT NOT NULL, 
	spec TEXT NOT NULL, 
	PRIMARY KEY (run_id, slice_id), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO "slices" VALUES(1,'cpu-0-0','{"slice_id": "cpu-0-0", "kind": "cpu", "pct": 50, "device_index": 0, "gpu_uuid": null, "cores": [0], "lane": null, "environment": []}');
CREATE TABLE spans (
	span_id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	worker TEXT NOT NULL, 
	activity TEXT NOT NULL, 
	start FLOAT NOT NULL, 
	"end" FLOAT NOT NULL, 
	role TEXT DEFAULT '' NOT NULL, 
	session_id INTEGER DEFAULT '1' NOT NULL, 
	items INTEGER DEFAULT '0' NOT NULL, 
	task_id TEXT DEFAULT '' NOT NULL, 
	busy_secs FLOAT, 
	cpu_secs FLOAT, 
	PRIMARY KEY (span_id), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO "spans" VALUES(1,1,'tuner-0','search',100.5,101.0,'tuner',1,0,'',NULL,NULL);
INSERT INTO "spans" VALUES(2,1,'cpu-0-0','measure',102.0,103.0,'slice',1,0,'',NULL,NULL);
INSERT INTO "spans" VALUES(3,1,'tuner-0','build',201.0,202.5,'tuner',2,0,'',NULL,NULL);
CREATE TABLE spot_checks (
	check_id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	session_id INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	task_id TEXT NOT NULL, 
	busy_secs FLOAT NOT NULL, 
	measurement TEXT NOT NULL, 
	PRIMARY KEY (check_id), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
CREATE TABLE task_outcomes (
	run_id INTEGER NOT NULL, 
	task_id TEXT NOT NULL, 
	saved_at FLOAT NOT NULL, 
	outcome TEXT NOT NULL, 
	winner_trace TEXT, 
	device TEXT, 
	sm_count INTEGER, 
	mechanism TEXT, 
	driver TEXT, 
	code_for TEXT, 
	tvm_version TEXT, 
	profile TEXT, 
	PRIMARY KEY (run_id, task_id), 
	FOREIGN KEY(run_id, task_id) REFERENCES tasks (run_id, task_id), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO "task_outcomes" VALUES(1,'t0',250.0,'{"task_id": "t0", "name": "conv", "weight": 3, "trials": 2, "failed": 1, "default_secs": 0.002, "best_secs": 0.001, "winner": {"task_id": "t0", "candidate_id": "0000000000000001", "origin": "search"}, "comparison": {"verdict": "faster", "base_secs": 0.002, "new_secs": 0.001, "ratio": 2.0, "ratio_low": 1.9, "ratio_high": 2.1}, "note": "", "finalists": [{"candidate_id": "00000000000000d0", "origin": "default", "search_secs": null, "measurement": {"run_secs": [0.002, 0.002], "calls_per_sample": 10, "profile": "model-v1", "slice_id": "cpu-0-0", "sm_count": 1, "conditions": {"sm_clock_mhz": null, "temperature_c": null, "power_w": null, "neighbours": null, "strangers": null, "disturbed_by": ""}}, "may_win": true}, {"candidate_id": "0000000000000001", "origin": "search", "search_secs": 0.0015, "measurement": {"run_secs": [0.001, 0.001], "calls_per_sample": 10, "profile": "model-v1", "slice_id": "cpu-0-0", "sm_count": 1, "conditions": {"sm_clock_mhz": null, "temperature_c": null, "power_w": null, "neighbours": null, "strangers": null, "disturbed_by": ""}}, "may_win": true}], "taken": null, "measured_as": "model-v1"}','[[1],[]]','CPU X',1,'affinity','','llvm znver3','0.27.0','model-v1');
CREATE TABLE tasks (
	position INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	task_id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	weight INTEGER NOT NULL, 
	flops FLOAT NOT NULL, 
	args TEXT NOT NULL, 
	weight_args TEXT NOT NULL, 
	target_kind TEXT NOT NULL, 
	target_json TEXT NOT NULL, 
	mod_json TEXT NOT NULL, 
	PRIMARY KEY (position), 
	UNIQUE (run_id, task_id), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO "tasks" VALUES(1,1,'t0','conv',3,1000000000.0,'[["a", [1, 2], "float32"]]','[0]','llvm','{"kind":"llvm","mcpu":"znver3"}','{}');
INSERT INTO "tasks" VALUES(2,1,'t1','dense',3,1000000000.0,'[["a", [1, 2], "float32"]]','[]','llvm','{"kind":"llvm","mcpu":"znver3"}','{}');
CREATE TABLE trials (
	trial_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	run_id INTEGER NOT NULL, 
	task_id TEXT NOT NULL, 
	candidate_id TEXT NOT NULL, 
	origin TEXT NOT NULL, 
	trace_json TEXT NOT NULL, 
	state TEXT NOT NULL, 
	proposed_at FLOAT NOT NULL, 
	started_at FLOAT, 
	ended_at FLOAT, 
	attempts INTEGER DEFAULT '0' NOT NULL, 
	slice_id TEXT, 
	build_secs FLOAT, 
	compiler TEXT, 
	library_sha256 TEXT, 
	stage TEXT, 
	kind TEXT, 
	message TEXT, 
	run_secs TEXT, 
	median_secs FLOAT, 
	calls_per_sample INTEGER, 
	profile TEXT, 
	sm_count INTEGER, 
	sm_clock_mhz INTEGER, 
	temperature_c INTEGER, 
	power_w FLOAT, 
	neighbours INTEGER, 
	strangers INTEGER, 
	disturbed_by TEXT, 
	FOREIGN KEY(run_id, task_id) REFERENCES tasks (run_id, task_id), 
	UNIQUE (run_id, candidate_id), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id)
);
INSERT INTO "trials" VALUES(1,1,'t0','0000000000000001','search','[[1],[]]','measured',101.0,102.0,103.0,1,'cpu-0-0',NULL,NULL,NULL,NULL,NULL,NULL,'[0.002, 0.001]',0.0015,10,'search-v1',1,1980,41,350.5,1,NULL,NULL);
INSERT INTO "trials" VALUES(2,1,'t0','0000000000000002','search','[[2],[]]','failed',101.0,102.0,103.0,1,'cpu-0-0',NULL,NULL,NULL,'run','wrong-answer','off by one',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "trials" VALUES(3,1,'t0','0000000000000003','search','[[3],[]]','proposed',101.0,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE UNIQUE INDEX sessions_by_run ON sessions (run_id, number);
CREATE INDEX proofs_by_slice ON proofs (run_id, slice_id);
CREATE INDEX trials_by_task ON trials (run_id, task_id, state, median_secs);
CREATE INDEX trials_by_state ON trials (run_id, state);
CREATE INDEX trials_by_disturbance ON trials (run_id, disturbed_by);
CREATE INDEX task_outcomes_by_task ON task_outcomes (task_id, device, sm_count);
CREATE INDEX ix_setbacks_trial_id ON setbacks (trial_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('trials',3);
COMMIT;
