//! `shadow`: the file of a shadow gives the draws without a shadow, and another file is an error.

use crate::common::{
    Files, bf16_bytes, checkpoint, f32_bytes, generate, run, run_logging, small_head, values, with, words,
};
use safetensors::tensor::Dtype;
use std::path::PathBuf;

/// Runs `shadow`; returns its output.
fn shadow(flags: &str) -> String {
    let run = run(&words(&format!("shadow {flags}")));
    assert_eq!((run.code, &*run.stderr), (0, ""), "{run:#?}");
    run.stdout
}

#[test]
fn a_shadow_in_a_file_gives_the_tokens_without_it() {
    let (files, head) = small_head();
    let weight = files.name("w.safetensors");
    let file = format!("{weight}.shadow");
    assert_eq!(shadow(&format!("--weight {weight}:w")), format!("{file}: the shadow of a weight [300, 32] in bf16\n"));
    let want = run(&with(&head, "--draws 50")).tokens();
    for flags in ["", "--variant sharded:4", "--backend reference", "--backend cpu::1"] {
        assert_eq!(run(&with(&head, &format!("--draws 50 --shadow={file} {flags}"))).tokens(), want, "{flags}");
    }
    assert_eq!(run(&with(&head, "--draws 50 --backend reference --shadow")).tokens(), want);
    assert_eq!(run(&with(&head, &format!("--draws 50 --shadow {file}"))).tokens(), want);
    // Nothing else is left in the folder.
    let mut names: Vec<_> = std::fs::read_dir(files.folder()).unwrap().map(|file| file.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["h.npy", "w.safetensors", "w.safetensors.shadow"]);
}

#[test]
fn a_shadow_of_a_checkpoint_gives_the_text_without_it() {
    let files = Files::new();
    let folder = files.name("model");
    std::fs::create_dir(&folder).unwrap();
    for file in std::fs::read_dir(checkpoint("qwen3")).unwrap().map(|file| file.unwrap()) {
        std::fs::copy(file.path(), PathBuf::from(&folder).join(file.file_name())).unwrap();
    }
    let file = format!("{folder}/head.shadow");
    assert!(shadow(&format!("--model {folder}")).starts_with(&file));
    let generate = words(&format!("generate --model {folder} --prompt Once -n 3 --max-tokens 20 --backend cpu::2"));
    let want = run(&generate);
    assert_eq!(want.code, 0, "{want:#?}");
    for flags in [format!("--shadow={file}"), "--shadow".into(), format!("--shadow={file} --draft {folder}")] {
        let found = run(&with(&generate, &flags));
        assert_eq!((found.code, found.stdout), (0, want.stdout.clone()), "{flags}: {}", found.stderr);
    }
}

#[test]
fn a_file_that_is_not_the_weights_shadow_is_refused() {
    let (files, head) = small_head();
    let weight = files.name("w.safetensors");
    let of = |name: &str, dtype, shape: [usize; 2], bytes| {
        let other = files.safetensors(name, &[("w", dtype, &shape, bytes)]);
        shadow(&format!("--weight {other}"));
        format!("{other}.shadow")
    };
    let refused = |file: &str, says: &str| {
        run(&with(&head, &format!("--shadow={file}"))).assert_refused(&format!("{file}: {says}"));
    };
    let values = values(300 * 32, 5);
    let other = of("a", Dtype::F32, [300, 32], f32_bytes(&values));
    refused(&other, "the shadow of another weight: its weight_dtype is f32, but the head's is bf16");
    let other = of("b", Dtype::BF16, [299, 32], bf16_bytes(&values[32..]));
    refused(&other, "the shadow of another weight: its weight_shape is [299, 32], but the head's is [300, 32]");
    let other = of("c", Dtype::BF16, [300, 32], bf16_bytes(&values));
    refused(&other, "the shadow of another weight: its weight_digest is ");
    refused(&weight, "the file is not a shadow: it has no weight_dtype; `flash-sampling shadow` writes a new file");
    refused(&files.name("missing"), "");
    shadow(&format!("--weight {weight}"));
    let mut bytes = std::fs::read(format!("{weight}.shadow")).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    refused(&files.bytes("damaged", &bytes), "the file is damaged: the digest of its parts is ");
    refused(&files.bytes("short", &bytes[..bytes.len() - 1]), "the file is truncated or not a shadow: ");
}

#[test]
fn only_a_new_file_is_written_unless_force_is_given() {
    let (files, _) = small_head();
    let weight = files.name("w.safetensors");
    let before = std::fs::read(&weight).unwrap();
    for force in ["", " --force"] {
        let onto_itself = words(&format!("shadow --weight {weight} --out {weight}{force}"));
        run(&onto_itself).assert_refused("w.safetensors exists, and only a file named *.shadow is replaced");
    }
    assert_eq!(std::fs::read(&weight).unwrap(), before);
    let out = files.bytes("old.shadow", b"old");
    run(&words(&format!("shadow --weight {weight} --out {out}")))
        .assert_refused("old.shadow exists; --force replaces it");
    let folder = files.name("");
    run(&words(&format!("shadow --weight {weight} --out {folder} --force"))).assert_refused("is a folder");
    assert!(shadow(&format!("--weight {weight} --out {out} --force")).starts_with(&out));
    assert!(std::fs::read(&out).unwrap().len() > 300 * 64);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |name: &str| std::fs::metadata(files.path(name)).unwrap().permissions().mode();
        assert_eq!(mode("old.shadow"), mode("w.safetensors"));
    }
    let nowhere = files.name("no/folder");
    run(&words(&format!("shadow --weight {weight} --out {nowhere}"))).assert_refused("cannot write ");
}

#[test]
fn flags_of_shadows_that_make_no_sense_are_refused() {
    let (files, head) = small_head();
    let weight = files.name("w.safetensors");
    for (flags, says) in [
        ("shadow".into(), "required"),
        (format!("shadow --weight {weight} --model {weight}"), "cannot be used with"),
        (format!("shadow --model {}", files.name("missing")), "there is no such directory or GGUF file"),
        ("verify --shadow=x".into(), "unexpected value 'x' for '--shadow' found; the flag takes no value here"),
        ("bench --quick --shadow=x".into(), "unexpected value 'x' for '--shadow' found; the flag takes no value here"),
        (
            format!("shadow --model {} --out {}", checkpoint("gguf/stories.gguf"), files.name("out")),
            "a weight of type q8_0 has no shadow: it must be bf16, f16 or f32; GGUF blocks are small already and need none",
        ),
        (
            format!("generate --model {} --shadow {}", checkpoint("gguf/stories.gguf"), files.name("none")),
            "a weight of type q8_0 has no shadow: it must be bf16, f16 or f32; GGUF blocks are small already and need none",
        ),
    ] {
        run(&words(&flags)).assert_refused(says);
    }
    run(&with(&head, "--variant online:64 --shadow=x")).assert_refused("online:64 on cpu uses no shadow");
    let helps = ["verify", "bench", "generate", "sample"].map(|of| run(&[of, "--help"]).stdout);
    assert_eq!(helps.map(|help| help.contains("--shadow [<FILE>]")), [false, false, true, true]);
    // A log that cannot be written changes nothing.
    let out = files.name("again");
    assert_eq!(run_logging("trace", &words(&format!("shadow --weight {weight} --out {out}"))).code, 0);
}

#[test]
fn generate_reports_the_rows_that_read_the_weight_instead_of_the_shadow() {
    // The rows that a CPU sampler counts depend on the processor.
    for (flags, fallback_rows) in [("", 0), ("--shadow", 0), ("--shadow --top-p 0.9", 18)] {
        let found = generate(&format!("--backend reference --max-tokens 9 -n 2 --report {flags}"));
        let report = &found[2]["report"];
        assert_eq!((&report["rows"], &report["fallback_rows"]), (&18.into(), &fallback_rows.into()), "{flags}");
    }
    let text = |flags: &str| run(&words(&format!("generate --max-tokens 9 --top-p 0.9 --report {flags}"))).stdout;
    assert!(text("--shadow").contains("\nshadow: 9 of 9 rows read the weight instead of the shadow\n"));
    assert!(!text("").contains("shadow"));
}

#[test]
fn the_benchmark_counts_the_rows_that_fall_back() {
    let files = Files::new();
    let json = files.name("record.json");
    let result = run(&["bench", "--quick", "--variants", "tiled", "--shadow", "--json", &json]);
    let says =
        ["  peaked rows that fall back from the shadow: ", " of 20 at temperature 0.3, ", " of 80 at temperature 1.5"];
    assert!(result.code == 0 && says.iter().all(|says| result.stdout.contains(says)), "{result:#?}");
    let record: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let counts = record["sections"][0]["fallbacks"].as_array().unwrap();
    assert_eq!(counts.len(), 4);
    assert!(
        counts.iter().all(|count| count["rows"] == 20 && count["fallback_rows"].as_u64().is_some_and(|n| n <= 20)),
        "{counts:?}"
    );
}
