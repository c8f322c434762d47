//! Bad input: one clear line on standard error, exit code 2, and no output. A bad row: its own error, exit code 1.

use crate::common::{
    Files, assert_refusals, bf16_bytes, checkpoint, f32_bytes, has_cuda, run, run_logging, small_head, values, with,
    words,
};
use safetensors::tensor::Dtype;

/// Asserts that a file for `--weight` is refused; the hidden states would fit a hidden size of 32.
fn refuse_weight(weight: &str, says: &str) {
    let files = Files::new();
    let hidden = files.npy("h.npy", &[1, 32], &values(32, 1));
    run(&["sample", "--weight", weight, "--hidden", &hidden]).assert_refused(says);
}

#[test]
fn missing_files_are_named() {
    let (files, head) = small_head();
    refuse_weight(&files.name("nothing.safetensors"), "nothing.safetensors: No such file");
    refuse_weight(files.folder().to_str().unwrap(), "is a directory");
    run(&["sample", "--model", &files.name("none"), "--hidden", &files.name("h.npy")])
        .assert_refused("none: there is no such directory");
    run(&with(&head, "--mask /nonexistent/mask.npy")).assert_refused("/nonexistent/mask.npy: No such file");
}

#[test]
#[cfg(unix)]
fn texts_without_an_end_are_refused() {
    let (files, head) = small_head();
    let says = |name: &str, limit: u64| format!("{name}: the file is larger than the limit of {limit} MiB");
    run(&with(&head, "--params /dev/zero")).assert_refused(&says("/dev/zero", 64));
    let folder = files.folder().to_str().unwrap();
    let limits = [("config.json", 64), ("generation_config.json", 64), ("model.safetensors.index.json", 64)];
    for (name, limit) in limits.into_iter().chain([("tokenizer.json", 256)]) {
        for copied in ["config.json", "model.safetensors", "tokenizer.json"] {
            let _ = std::fs::remove_file(files.path(copied));
            std::fs::copy(checkpoint(&format!("llama/{copied}")), files.path(copied)).unwrap();
        }
        let _ = std::fs::remove_file(files.path(name));
        std::os::unix::fs::symlink("/dev/zero", files.path(name)).unwrap();
        run(&["generate", "--model", folder]).assert_refused(&says(name, limit));
        std::fs::remove_file(files.path(name)).unwrap();
    }
}

#[test]
fn flags_of_ranks_require_a_transport() {
    let (_files, head) = small_head();
    assert_refusals(
        &head,
        "
        --time-limit 3 => --time-limit has no effect without --transport
        --exchange host => --exchange has no effect without --transport mpi
        --transport mpi --exchange ring => possible values: host, peers, nccl
        --transport mpi --time-limit 0 => 0.001 to 86400 seconds",
    );
    if cfg!(feature = "cuda") {
        assert_refusals(
            &with(&head, "--transport peers"),
            "
            --seed 1 => need --backend cuda and --variant tiled
            --backend cuda:1 => need --backend cuda and --variant tiled
            --backend cuda --exchange peers => --exchange is for --transport mpi
            --backend cuda --canonical --top-k 5 => --top-k is not supported with --canonical; leave out --canonical",
        );
    }
    if cfg!(feature = "mpi") {
        run(&with(&head, "--transport mpi --variant sharded:4")).assert_refused("has its shards in one process");
    }
    if cfg!(all(feature = "mpi", feature = "cuda")) {
        // Without mpirun there is only one rank.
        assert_refusals(
            &with(&head, "--transport mpi --exchange peers"),
            "
            --seed 1 => --exchange peers and nccl need --backend cuda and --variant tiled
            --backend cuda --variant grouped:64 => --exchange peers and nccl need --backend cuda",
        );
    }
}

#[test]
fn a_transport_names_at_once_the_features_that_it_lacks() {
    let (_files, head) = small_head();
    let refused = |flags: &str, features: &str| {
        run(&with(&head, flags)).assert_refused(&format!("no feature '{features}': build with --features {features}"));
    };
    if cfg!(not(feature = "nccl")) {
        refused("--transport nccl", "nccl");
        refused("--transport nccl --backend cuda", "nccl");
    }
    if cfg!(not(feature = "cuda")) {
        refused("--transport peers", "cuda");
        refused("--transport peers --variant sharded:4", "cuda");
    }
    if cfg!(not(feature = "mpi")) {
        refused("--transport mpi", "mpi");
        refused("--transport mpi --variant sharded:4", "mpi");
        let both = if cfg!(feature = "cuda") { "mpi" } else { "mpi,cuda" };
        refused("--transport mpi --backend cuda", both);
        refused("--transport mpi --backend cuda --exchange peers", both);
        let both = if cfg!(feature = "nccl") { "mpi" } else { "mpi,nccl" };
        refused("--transport mpi --backend cuda --exchange nccl", both);
    } else {
        if cfg!(not(feature = "cuda")) {
            refused("--transport mpi --backend cuda --exchange peers", "cuda");
        }
        if cfg!(not(feature = "nccl")) {
            refused("--transport mpi --backend cuda --exchange nccl", "nccl");
        }
    }
}

#[test]
fn missing_tensors_are_named() {
    let files = Files::new();
    let two = files.safetensors(
        "two.safetensors",
        &[
            ("a", Dtype::F32, &[4, 32], f32_bytes(&values(128, 1))),
            ("b", Dtype::F32, &[4, 32], f32_bytes(&values(128, 2))),
        ],
    );
    refuse_weight(&two, "which tensor? Name one as FILE:TENSOR; it has 2: a, b");
    refuse_weight(&format!("{two}:lm_head.weight"), "no tensor \"lm_head.weight\"; it has 2: a, b");
    let array = files.npy("a.npy", &[4, 32], &values(128, 1));
    refuse_weight(&format!("{array}:x"), "no tensor \"x\"");
}

#[test]
fn files_of_other_formats_are_named() {
    let files = Files::new();
    refuse_weight(&files.bytes("hidden.npz", b"PK\x03\x04 an archive"), "or .npy file but a zip archive");
    let pointer = files.bytes("w.safetensors", b"version https://git-lfs.github.com/spec/v1\n");
    refuse_weight(&pointer, "w.safetensors: not a safetensors, GGUF or .npy file");
}

#[test]
fn names_of_files_are_escaped_and_cut() {
    let (files, head) = small_head();
    let tensor = |name: &str| files.safetensors("x.safetensors", &[(name, Dtype::I8, &[4, 32], vec![0; 128])]);
    refuse_weight(&tensor("red\x1b[31m\r\u{9b}"), "red\\u{1b}[31m\\r\\u{9b} has elements of 8 bits without scales");
    refuse_weight(&tensor(&"long".repeat(2500)), "long...glonglong");
    for key in ["red\\u001b[31m", &"long".repeat(2500)] {
        let file = files.bytes("p.json", format!(r#"{{"{key}": 1, "{key}": 1}}"#).as_bytes());
        let twice = run(&with(&head, &format!("--params {file}")));
        twice.assert_refused("duplicate field `");
        assert!(!twice.stderr.contains('\x1b') && twice.stderr.len() < 500, "{twice:?}");
        let file = files.bytes("p.json", format!(r#"{{"{key}": 1}}"#).as_bytes());
        let unknown = run(&with(&head, &format!("--params {file}")));
        unknown.assert_refused("unknown field `");
        assert!(!unknown.stderr.contains('\x1b') && unknown.stderr.len() < 2500, "{unknown:?}");
        let file = files.bytes("p.json", format!(r#"{{"temperature": "{key}"}}"#).as_bytes());
        let wrong = run(&with(&head, &format!("--params {file}")));
        wrong.assert_refused("temperature: invalid type");
        assert!(!wrong.stderr.contains('\x1b') && wrong.stderr.len() < 2500, "{wrong:?}");
    }
}

#[test]
fn types_that_cannot_be_read_are_named() {
    let files = Files::new();
    let tensor =
        |dtype, size: usize| files.safetensors("x.safetensors", &[("x", dtype, &[4, 32], vec![0; 128 * size])]);
    refuse_weight(&tensor(Dtype::U8, 1), "x has dtype U8, expected bf16, f16, f32, f8_e4m3 or i8");
    refuse_weight(&tensor(Dtype::F64, 8), "x has dtype F64");
    refuse_weight(&tensor(Dtype::F8_E5M2, 1), "x has dtype F8_E5M2");
    refuse_weight(&files.npy("d.npy", &[4, 32], &[0f64; 128]), "dtype <f8, expected little-endian float32");
    refuse_weight(&files.npy("u.npy", &[4, 32], &[0u32; 128]), "dtype <u4");
}

#[test]
fn shapes_that_make_no_head_are_named() {
    let (files, head) = small_head();
    refuse_weight(&files.npy("v.npy", &[32], &values(32, 1)), "has shape [32], expected [vocab, hidden]");
    refuse_weight(&files.npy("c.npy", &[2, 2, 32], &values(128, 1)), "has shape [2, 2, 32]");
    refuse_weight(&files.npy("z.npy", &[0, 32], &[0f32; 0]), "has shape [0, 32]");
    refuse_weight(&files.npy("y.npy", &[4, 0], &[0f32; 0]), "has shape [4, 0]");
    refuse_weight(
        &files.npy("n.npy", &[4, 16], &values(64, 1)),
        "h.npy: the hidden states have 32 columns, but the head has hidden size 16; its weight [vocab, hidden] is [4, 16]",
    );
    let no_rows = files.npy("h0.npy", &[0, 32], &[0f32; 0]);
    run(&[&head[..6], &[no_rows]].concat()).assert_refused("has shape [0, 32], expected [rows, hidden] or [hidden]");
    let text = b"{'descr': '<f4', 'fortran_order': True, 'shape': (1, 32)}";
    let fortran = [b"\x93NUMPY\x01\x00", &[text.len() as u8, 0][..], text, &[0; 128]].concat();
    run(&[&head[..6], &[files.bytes("f.npy", &fortran)]].concat()).assert_refused("expected C order");
}

#[test]
fn truncated_and_damaged_files_are_refused() {
    let files = Files::new();
    let whole = files.safetensors("w.safetensors", &[("w", Dtype::BF16, &[4, 32], bf16_bytes(&values(128, 1)))]);
    let bytes = std::fs::read(whole).unwrap();
    for keep in [0, 4, 8, 20, bytes.len() - 1] {
        refuse_weight(&files.bytes("cut.safetensors", &bytes[..keep]), "the file is truncated or damaged");
    }
    refuse_weight(&files.bytes("long.safetensors", &[&bytes[..], &[0]].concat()), "the file is truncated or damaged");
    let mut garbled = bytes;
    garbled[9] = 0xff;
    refuse_weight(&files.bytes("garbled.safetensors", &garbled), "not a valid safetensors file");
    let array = std::fs::read(files.npy("a.npy", &[4, 32], &values(128, 1))).unwrap();
    refuse_weight(&files.bytes("cut.npy", &array[..array.len() - 1]), "needs 512 bytes, found 511");
    refuse_weight(&files.bytes("long.npy", &[&array[..], &array].concat()), "needs 512 bytes, found 1152");
    refuse_weight(&files.bytes("head.npy", &array[..30]), "the file is truncated or damaged");
    refuse_weight(&files.bytes("text.npy", b"1 2 3\n"), "not a valid .npy file");
}

#[test]
fn masks_must_decide_every_token() {
    let (files, head) = small_head();
    let mask = |path: String, says: &str| run(&with(&head, &format!("--mask {path}"))).assert_refused(says);
    mask(files.npy("short.npy", &[9], &[u32::MAX; 9]), "9 words a row, for 288 tokens; the vocabulary has 300");
    mask(files.npy("rows.npy", &[2, 10], &[u32::MAX; 20]), "has shape [2, 10], expected [words] or [3, words]");
    mask(files.npy("type.npy", &[10], &[u64::MAX; 10]), "dtype <u8, expected little-endian uint32");
    mask(files.npy("flat.npy", &[], &[1u32]), "has shape []");
}

#[test]
fn invalid_flags_are_refused() {
    let (_files, head) = small_head();
    assert_refusals(
        &head,
        r#"
        --logit-bias 3 => "3" is not ID:VALUE
        --logit-bias 3:x => is not a number
        --logit-bias 3:1,3:2 => token 3 is named twice
        --logit-bias 300:1 => --logit-bias names token 300, but the vocabulary has size 300
        --vocab-size 290 --logit-bias 290:1 => the vocabulary has size 290
        --vocab-size 301 => --vocab-size 301: it must be 1 to 300, the rows of the weight
        --vocab-size 0 => --vocab-size 0: it must be 1 to 300
        --backend gpu => 'gpu' is no backend: it must be reference, cpu[:INSTRUCTION SET[:THREADS]] or cuda[:DEVICE]
        --backend cpu:sse9 => 'cpu:sse9' is no backend
        --backend cpu::-2 => 'cpu::-2' is no backend
        --backend cpu::0 => --backend: 0 threads
        --backend cpu::100000 => --backend: 100000 threads
        --temperature nan => must be finite and not negative
        --temperature -0.5 => must be finite and not negative
        --temperature warm => not a number
        --temperature 1e-50 => '1e-50' for '--temperature <T>': it rounds to 0 as a float32
        --top-p 1e-60 => '1e-60' for '--top-p <P>': it rounds to 0
        --min-p 0.1e-400 => '0.1e-400' for '--min-p <P>': it rounds to 0
        --presence-penalty 1e-60 => '1e-60' for '--presence-penalty <X>': it rounds to 0
        --top-p much => 'much' for '--top-p <P>': it is not a number
        --variant sharded:4:log-mass --top-p 0.9 => --top-p is not supported with --variant sharded:4:log-mass; use --variant tiled
        --draws 0 => it must be 1 to 10000000
        --draws 10000001 => it must be 1 to 10000000
        --draws 301 --without-replacement => the vocabulary has size 300
        --seeds 1,2 => --seeds has 2 numbers for 3 rows
        --seeds 1 => --seeds has 1 number for 3 rows
        --vocab-size 1 --logprobs 2 => --logprobs is 2, but the vocabulary has size 1
        --seeds 1,2,x => invalid value 'x' for '--seeds
        --seed 1 --seeds 1,2,3 => cannot be used with
        --position 72057594037927934 => --position 72057594037927934 for 3 rows: the position of the last row exceeds 2^56 - 1
        --soft-cap 0 => '0' for '--soft-cap <CAP>': it must be finite and above 0
        --scale -1 => '-1' for '--scale <FACTOR>': it must be finite and above 0
        --scale inf => must be finite and above 0
        --draws -1 => '-1' for '--draws <N>': it must be 1 to 10000000
        --seed -2 => '-2' for '--seed <SEED>': it must be 0 to 18446744073709551615, or -1 for none
        --position -1 => '-1' for '--position <P>'
        --seeds -1 => '-1' for '--seeds <A,B,...>': it must be 0 to 18446744073709551615
        --seeds -1,2,3 => '-1' for '--seeds
        --logit-bias -1:1 => '--logit-bias <ID:VALUE,...>': "-1" in "-1:1" is not a token id
        --logprobs -2 => '-2' for '--logprobs <N>': it must be 0 to 4294967295, or -1 for all
        --logprobs 301 => --logprobs is 301, but the vocabulary has size 300
        --vocab-size 290 --logprobs 291 => the vocabulary has size 290
        --vocab-size -1 => '-1' for '--vocab-size <N>'
        --variant fast => 'fast' is no variant: it must be tiled, grouped:SIZE, online:SIZE or sharded:SHARDS[:log-mass]
        --variant grouped:-2 => 'grouped:-2' is no variant
        --variant tiled:4 => 'tiled:4' is no variant
        --variant sharded:0 => 0 shards cannot be made: it must be 1 to 4096
        --variant sharded:4097 => it must be 1 to 4096
        --variant grouped:0 => a group of 0 tokens cannot be used: it must be a positive multiple of 64
        --variant online:1000 => a group of 1000 tokens cannot be used
        --variant grouped:64 --without-replacement => --without-replacement is not supported with --variant grouped:64; use --variant tiled
        --variant grouped:64 --canonical => --canonical is not supported with this variant; use --variant tiled
        --top-k five => invalid value 'five' for '--top-k <K>': it must be -1 to 2147483647
        --top-k -2 => '-2' for '--top-k <K>': it must be -1
        --top-p 2 => --top-p is 2.0, but must be above 0 and at most 1
        --kept --temperature 0 => --kept is not defined for a greedy row"#,
    );
    run(&["sample", "--hidden", &head[6]]).assert_refused("--hidden needs --model or --weight");
    run(&["sample", "--weight", &head[4]]).assert_refused("--hidden");
    run(&["sample", "--format", "xml"]).assert_refused("possible values: text, json");
    run(&["draw"]).assert_refused("unrecognized subcommand 'draw'; --help lists all");
    run(&["smaple"]).assert_refused("unrecognized subcommand 'smaple'; a similar subcommand exists: 'sample'");
    run(&["sample", "--top", "5"]).assert_refused("unexpected argument '--top' found; ");
}

#[test]
fn a_knob_that_a_variant_lacks_names_the_flag_and_an_alternative() {
    let (files, head) = small_head();
    for variant in ["--variant online:64", "--variant grouped:64", "--variant sharded:4:log-mass"] {
        let says = &format!("is not supported with {variant}; use --variant tiled");
        for flag in ["--top-k 5", "--top-p 0.9", "--xtc-probability 0.5"] {
            for command in [&head[..], &["generate".into()]] {
                let name = flag.split(' ').next().unwrap();
                run(&with(command, &format!("{variant} {flag}"))).assert_refused(&format!("{name} {says}"));
            }
        }
        // A field of one row's object is an error of that row.
        let params = files.bytes("params.json", br#"[{}, {"top_k": 5}, {}]"#);
        let rows = run(&with(&head, &format!("{variant} --params {params}"))).rows();
        assert_eq!(rows[1]["error"], format!("top_k {says}"));
        assert!(rows[0]["error"].is_null() && rows[2]["error"].is_null(), "{rows:?}");
    }
    run(&with(&head, "--canonical --top-k 5"))
        .assert_refused("--top-k is not supported with --canonical; leave out --canonical");
    run(&with(&head, "--canonical --logprobs 1 --logprobs-mode raw"))
        .assert_refused("--logprobs-mode is not supported with --canonical; leave out --canonical");
}

#[test]
fn a_backend_or_instruction_set_that_is_missing_is_refused() {
    let (_files, head) = small_head();
    if !has_cuda() {
        let says = "this build has no feature 'cuda': build with --features cuda";
        run(&with(&head, "--backend cuda")).assert_refused(says);
        // The error precedes all log lines about a head.
        run_logging("info", &["sample", "--backend", "cuda"]).assert_refused(says);
    }
    let missing = flash_sampling::Isa::ALL.into_iter().find(|isa| !isa.is_available());
    if let Some(isa) = missing {
        let (flag, says) = (format!("--backend cpu:{isa}"), format!("--backend: this machine has no {isa}"));
        run(&words(&format!("bench --quick {flag}"))).assert_refused(&says);
        run(&with(&head, &flag)).assert_refused(&says);
    }
}

#[test]
fn a_bad_row_fails_alone() {
    let (files, head) = small_head();
    let good = run(&head).rows();
    for (bad, says) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let mut hidden = values(3 * 32, 2);
        hidden[40] = bad;
        let path = files.npy("bad.npy", &[3, 32], &hidden);
        let result = run(&[&head[..6], std::slice::from_ref(&path)].concat());
        assert_eq!(result.code, 1, "{result:#?}");
        let rows = result.rows();
        let error = rows[1]["error"].as_str().unwrap();
        assert!(error.starts_with(&format!("hidden state 8 of the row is {says}: ")), "{rows:?}");
        assert!(run_logging("warn", &[&head[..6], &[path]].concat()).stderr.contains("1 of 3 rows has no draw"));
        assert_eq!(rows[1]["row"], 1);
        assert_eq!((&rows[0], &rows[2]), (&good[0], &good[2]));
    }
    let nothing_allowed = files.npy("none.npy", &[10], &[0u32; 10]);
    let says = "no token can be drawn: each is masked, banned or has logit -inf (the mask allows none)";
    let result = run(&with(&head, &format!("--mask {nothing_allowed}")));
    assert_eq!(result.code, 1);
    assert!(result.rows().iter().all(|row| row["error"] == says), "{result:#?}");
}

/// Log lines about a head would hide the error.
#[test]
fn an_error_has_no_log_lines_before_it() {
    run_logging("info", &["sample", "--vocab-size", "0"]).assert_refused("--vocab-size 0: it must be 1 to 151936");
    run_logging("info", &["sample", "--draws", "9", "--seeds", "1"]).assert_refused("--seeds has 1 number for 4 rows");
    run_logging("info", &["generate", "--temperature", "0", "--top-k", "4", "--logit-bias", "9999:1"])
        .assert_refused("--logit-bias names token 9999");
}

#[test]
fn an_unknown_log_level_is_named() {
    let bogus = run_logging("bogus", &["info"]);
    assert_eq!((bogus.code, bogus.stdout.as_str()), (2, ""));
    assert!(bogus.stderr.contains("FLASH_SAMPLING_LOG is \"bogus\""), "{}", bogus.stderr);
    assert_eq!(run_logging("", &["info"]).code, 0);
}
