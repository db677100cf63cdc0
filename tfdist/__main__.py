from tfdist.cli.main import main

main()
